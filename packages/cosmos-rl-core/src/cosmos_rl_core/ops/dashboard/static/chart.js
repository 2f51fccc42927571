// Line charts over uPlot: smoothing, bands of downsampled values, linked cursors, zoom, keyboard.
import { $, bytes, colour, el, number, series } from './dom.js'

// Exponential moving average without the bias of its start.
export function smooth(values, weight) {
  if (!weight) return values
  let sum = 0, mass = 0
  return values.map(value => {
    if (value == null) return mass ? sum / mass : null
    sum = sum * weight + value * (1 - weight)
    mass = mass * weight + (1 - weight)
    return sum / mass
  })
}

const waiting = new IntersectionObserver(entries => {
  for (const entry of entries) if (entry.isIntersecting) { waiting.unobserve(entry.target); entry.target.render() }
}, { rootMargin: '400px' })

// lines: [{label, x, mean, low, high}]. options: {title, note, smoothing, group, unit, onzoom(low, high), onreset(), onpick(x), points}
export function chart(lines, options) {
  const { title, note, smoothing = 0, group = 'steps', unit = '' } = options
  const text = value => unit === 'bytes' ? bytes(value) : number(value)
  const last = lines.map(line => line.mean.filter(value => value != null).at(-1))
  const known = lines.flatMap(line => line.mean).filter(value => value != null)
  const value = el('span', { class: 'value' }, last.map(text).join(' | '))
  const target = el('div', { 'aria-hidden': 'true' }) // the figure's name says what it shows
  const spoken = `${title}: now ${last.map(text).join(' and ')}; from ${text(known.reduce((a, b) => Math.min(a, b), Infinity))} to ${text(known.reduce((a, b) => Math.max(a, b), -Infinity))}`
  const box = el('figure', { class: 'card chart', 'data-name': title, tabindex: '0', role: 'group', 'aria-label': spoken }, el('figcaption', { title: note }, title, value), target)
  box.render = () => draw(box, target, value, lines, { ...options, smoothing, group, text, last })
  waiting.observe(box)
  return box
}

function draw(box, target, value, lines, { smoothing, group, text, last, onzoom, onreset, onpick }) {
  const tables = [], kinds = [{}], bands = []
  lines.forEach((line, i) => {
    const rows = [line.x], color = series(line.index ?? i), few = line.x.length < 30
    const add = (values, kind) => { rows.push(values); kinds.push(kind); return kinds.length - 1 }
    if (line.low) {
      const hidden = { stroke: 'transparent', points: { show: false }, spanGaps: true }
      const upper = add(line.high, { ...hidden }), lower = add(line.low, { ...hidden })
      bands.push({ series: [upper, lower], fill: color + '22' })
    }
    const soft = few ? 0 : smoothing
    if (soft && !line.low) add(line.mean, { stroke: color + '40', width: 1, spanGaps: true, points: { show: false } })
    line.shown = add(smooth(line.mean, soft), { stroke: color, width: 1.8, spanGaps: true, points: { show: few, size: 5, fill: color } })
    tables.push(rows)
  })
  const data = tables.length > 1 ? uPlot.join(tables) : tables[0]
  const axis = { stroke: colour('--dim'), ticks: { show: false }, font: '11px system-ui' }
  const plot = new uPlot({
    width: target.clientWidth || 340, height: 150, series: kinds, bands, legend: { show: false },
    scales: { x: { time: false } },
    cursor: { sync: { key: group }, drag: { x: true, y: false, setScale: false }, points: { size: 6 }, bind: { dblclick: () => () => { onreset?.(); return null } } },
    axes: [
      { ...axis, grid: { show: false }, size: 24, values: (u, ticks) => ticks.map(tick => number(tick)) },
      { ...axis, grid: { stroke: colour('--line'), width: 1 }, size: 56, values: (u, ticks) => ticks.map(text) },
    ],
    hooks: {
      setCursor: [u => {
        const at = u.cursor.idx
        value.textContent = at == null ? last.map(text).join(' | ') : `${number(data[0][at])}: ${lines.map(line => text(data[line.shown][at])).join(' | ')}`
      }],
      setSelect: [u => {
        if (u.select.width < 6) return
        onzoom?.(u.posToVal(u.select.left, 'x'), u.posToVal(u.select.left + u.select.width, 'x'))
      }],
    },
  }, data, target)
  plot.over.addEventListener('click', event => { if (event.detail === 1 && plot.cursor.idx != null) onpick?.(data[0][plot.cursor.idx]) })
  box.addEventListener('keydown', event => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key]
    if (move) {
      const at = Math.max(0, Math.min(data[0].length - 1, (plot.cursor.idx ?? (move > 0 ? -1 : data[0].length)) + move))
      plot.setCursor({ left: plot.valToPos(data[0][at], 'x'), top: 60 })
      value.setAttribute('aria-live', 'polite')
      event.preventDefault()
    } else if (event.key === 'Enter' && plot.cursor.idx != null) onpick?.(data[0][plot.cursor.idx])
  })
  new ResizeObserver(() => plot.setSize({ width: target.clientWidth, height: 150 })).observe(target)
}

export const legend = labels => el('div', { class: 'row' }, labels.map((label, i) => el('span', {}, el('i', { class: `swatch s${i % 8 + 1}` }), label)))
