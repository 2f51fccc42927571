// Spans of all processes on one axis of time: work, waits, weights, and groups in flight.
import { colour, el, empty, hideTip, ofRun, seconds, series, share, showTip, table } from './dom.js'

const HEIGHT = { area: 34, spans: 20 }

export async function timeline(view, [id]) {
  let start = null, length = null, data = null
  const lanes = el('div', { class: 'lanes', tabindex: '0', role: 'group', 'aria-label': 'Timeline; arrow keys move, plus and minus zoom' }), legend = el('div', { class: 'row' }), shares = el('div'), place = el('span', { class: 'dim' })
  const load = async () => {
    data = await ofRun(id, 'timeline', { pixels: Math.max(300, lanes.clientWidth - 180), ...(start == null ? {} : { start, length }) })
    draw()
  }
  const go = (from, size) => {
    size = Math.max(1e-4, Math.min(size, data.full))
    start = Math.max(0, Math.min(from, data.full - size)); length = size
    return load()
  }
  const zoom = (factor, middle = data.start + data.length / 2) => go(middle - (middle - data.start) * factor, data.length * factor)
  const pan = by => go(data.start + by * data.length, data.length)
  const whole = () => { start = length = null; return load() }

  const colours = new Map()
  let works = 0 // waits are grey and take no colour of the palette
  const paint = name => { if (!colours.has(name)) colours.set(name, name.startsWith('wait for') ? colour('--dim') + '70' : series(works++)); return colours.get(name) }

  function draw() {
    const known = data.lanes.length
    place.textContent = known ? `${seconds(data.start)} to ${seconds(data.start + data.length)} of ${seconds(data.full)}${data.is_cut ? '; older spans are in timeline.json' : ''}` : ''
    const cells = []
    let last = ''
    for (const lane of data.lanes) {
      const canvas = el('canvas', { role: 'img', 'aria-label': `${lane.process}, ${lane.lane}: ${lane.area ? `up to ${Math.max(...lane.area.map(point => point[1]))} at once` : `${lane.spans.length} spans`}` })
      cells.push(el('div', { class: 'who' }, lane.process === last ? '' : el('b', {}, lane.process), el('small', {}, lane.lane)), canvas)
      last = lane.process
      requestAnimationFrame(() => lane.area ? area(canvas, lane) : spans(canvas, lane))
    }
    lanes.replaceChildren(...cells)
    requestAnimationFrame(() => legend.replaceChildren(...[...colours].map(([name, value]) => { const swatch = el('i', { class: 'swatch' }); swatch.style.background = value; return el('span', {}, swatch, name) })))
    shares.replaceChildren(...Object.entries(data.shares).map(([process, found]) => {
      const rows = Object.entries(found).sort((a, b) => b[1] - a[1])
      return el('div', { class: 'card' }, table(rows, [['activity', '', row => row[0]], ['share', 'n', row => share(row[1])], ['time', 'n', row => seconds(row[1] * data.length)]], { caption: process }))
    }))
    if (!known) lanes.replaceChildren(empty('No process has written spans/ yet.'))
  }

  function context(canvas, height) {
    const scale = devicePixelRatio, width = canvas.clientWidth
    canvas.width = width * scale; canvas.height = height * scale; canvas.style.height = `${height}px`
    const c = canvas.getContext('2d'); c.scale(scale, scale)
    c.fillStyle = colour('--shade'); c.fillRect(0, 0, width, height)
    return [c, width]
  }

  function spans(canvas, lane) {
    const [c, width] = context(canvas, HEIGHT.spans), x = at => at / data.length * width
    for (const [at, dur, name] of lane.spans) { c.fillStyle = paint(name); c.fillRect(x(at), 1, Math.max(1, x(dur)), HEIGHT.spans - 2) }
    canvas.onmousemove = event => {
      const at = event.offsetX / width * data.length, slack = 2 / width * data.length
      const hit = lane.spans.findLast(span => at >= span[0] - slack && at <= span[0] + span[1] + slack)
      if (!hit) return hideTip()
      const [, dur, name, args, count] = hit, values = JSON.parse(args)
      showTip(event, [`${name}: ${seconds(dur)}`, count > 1 ? `${count} spans` : Object.entries(values).map(([key, value]) => `${key} ${value}`).join(', ')].filter(Boolean).join('\n'))
    }
    mouse(canvas)
  }

  function area(canvas, lane) {
    const [c, width] = context(canvas, HEIGHT.area), most = Math.max(1, ...lane.area.map(point => point[1])), x = at => Math.max(0, Math.min(width, at / data.length * width)), y = depth => HEIGHT.area - depth / most * (HEIGHT.area - 6)
    c.fillStyle = series(0) + '88'; c.beginPath(); c.moveTo(0, HEIGHT.area)
    let depth = 0
    for (const [at, now] of lane.area) { c.lineTo(x(at), y(depth)); c.lineTo(x(at), y(now)); depth = now }
    c.lineTo(x(lane.area.at(-1)[0]), HEIGHT.area); c.fill()
    canvas.onmousemove = event => { const at = event.offsetX / width * data.length, hit = lane.area.findLast(point => point[0] <= at); showTip(event, `${hit?.[1] ?? 0} groups in flight (at most ${most})`) }
    mouse(canvas)
  }

  function mouse(canvas) {
    canvas.onmouseleave = hideTip
    let from = null
    canvas.onmousedown = event => { from = event.offsetX }
    canvas.onmouseup = event => {
      const begin = Math.min(from ?? 0, event.offsetX), end = Math.max(from ?? 0, event.offsetX), width = canvas.clientWidth
      if (from != null && end - begin > 5) go(data.start + begin / width * data.length, (end - begin) / width * data.length)
      from = null
    }
    canvas.ondblclick = whole
  }

  const button = (text, act, label) => el('button', { type: 'button', onclick: act, 'aria-label': label }, text)
  view.replaceChildren(el('h1', {}, 'Timeline'),
    el('div', { class: 'row' }, button('+', () => zoom(.5), 'Zoom in'), button('−', () => zoom(2), 'Zoom out'), button('←', () => pan(-.5), 'Earlier'), button('→', () => pan(.5), 'Later'), button('Whole run', whole), button('Last minute', () => go(data.full - 60, 60)), place, el('span', { class: 'grow' }), el('a', { href: `/api/run/${encodeURIComponent(id)}/timeline.json`, download: true }, 'timeline.json for Perfetto')),
    el('p', { class: 'dim' }, 'Drag to zoom, double-click for the whole run. Grey is waiting.'), el('div', { class: 'card' }, lanes), el('p', {}), legend, el('h2', {}, 'Where the time of this window went'), el('div', { class: 'grid' }, shares))
  shares.className = 'grid'; shares.parentElement.className = ''
  await load()
  lanes.addEventListener('keydown', event => { const act = { ArrowLeft: () => pan(-.25), ArrowRight: () => pan(.25) }[event.key]; if (act) { act(); event.preventDefault() } })
  const resized = new ResizeObserver(() => data && draw()); resized.observe(view)
  return { keys: { '+': () => zoom(.5), '=': () => zoom(.5), '-': () => zoom(2) }, async refresh() { if (start == null) await load() }, close() { resized.disconnect() } }
}
