// Elements, numbers as text, requests, and the tooltip.
export const $ = (selector, root = document) => root.querySelector(selector)

// el('td', {class: 'n', onclick: ...}, 'text', child, [children]); null and false are left out.
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag)
  for (const [name, value] of Object.entries(properties)) {
    if (value == null || value === false) continue
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value)
    else if (name in element && typeof value !== 'string') element[name] = value
    else element.setAttribute(name, value === true ? '' : value)
  }
  element.append(...children.flat(Infinity).filter(child => child != null && child !== false).map(child => child instanceof Node ? child : String(child)))
  return element
}

// Replaces the children; null and false are left out, as in el().
export const fill = (element, ...children) => element.replaceChildren(...children.flat(Infinity).filter(child => child != null && child !== false))

// Calls draw(), after which the part of the page that had the keyboard has it again: found by its name among the new ones.
export function keepFocus(root, draw) {
  const held = root.contains(document.activeElement) ? document.activeElement.dataset.name : null
  draw()
  if (held) [...root.querySelectorAll('[data-name]')].find(element => element.dataset.name === held)?.focus({ preventScroll: true })
}

export const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()
export const series = index => colour(`--c${index % 8 + 1}`)

export function number(value, digits = 4) {
  if (value == null || Number.isNaN(value)) return '–'
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)) return value.toExponential(2)
  return Number(value.toPrecision(digits)).toLocaleString('en', { maximumFractionDigits: 6 })
}

export function bytes(value) {
  if (value == null) return '–'
  const units = ['B', 'kB', 'MB', 'GB', 'TB']
  let unit = 0
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit++ }
  return `${unit ? value.toFixed(1) : Math.round(value)} ${units[unit]}`
}

export function seconds(value) {
  if (value == null) return '–'
  if (value === 0) return '0 s'
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`
  if (value < 1) return `${(value * 1e3).toPrecision(3)} ms`
  if (value < 90) return `${value.toFixed(1)} s`
  if (value < 5400) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`
  return `${Math.floor(value / 3600)} h ${Math.round(value % 3600 / 60)} min`
}

export const share = value => value == null ? '–' : `${(100 * value).toFixed(value < .1 ? 1 : 0)} %`
export const median = values => { const sorted = values.filter(v => v != null).sort((a, b) => a - b); return sorted.length ? sorted[sorted.length >> 1] : null }
export const clock = at => at ? new Date(at * 1000).toLocaleString() : '–'

export async function get(path) {
  const answer = await fetch('/api/' + path)
  if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`)
  return answer.json()
}
export const ofRun = (id, view, query) => get(`run/${encodeURIComponent(id)}/${view}${query ? '?' + new URLSearchParams(query) : ''}`)

// A picture, or a video with a button below it: the browser's own controls would cover half of a small one.
export function player(id, row, caption) {
  const source = `/api/run/${encodeURIComponent(id)}/media/${row.file.split('/').map(encodeURIComponent).join('/')}`
  if (!row.file.endsWith('.mp4')) return el('img', { src: source, loading: 'lazy', alt: caption })
  const video = el('video', { src: source, loop: true, playsinline: true, preload: 'metadata', 'aria-label': caption })
  video.muted = true
  const button = el('button', { type: 'button', 'aria-label': `Play: ${caption}`, onclick: () => video.paused ? video.play() : video.pause() }, 'Play')
  const show = () => { button.textContent = video.paused ? 'Play' : 'Pause'; button.setAttribute('aria-label', `${button.textContent}: ${caption}`) }
  video.addEventListener('play', show)
  video.addEventListener('pause', show)
  return el('div', { class: 'player' }, video, button)
}

export const store = {
  get(key, otherwise) { try { return JSON.parse(localStorage.getItem('cosmos-rl.' + key)) ?? otherwise } catch { return otherwise } },
  set(key, value) { localStorage.setItem('cosmos-rl.' + key, JSON.stringify(value)) },
}

const tip = $('#tip')
export function showTip(event, text) {
  tip.textContent = text
  tip.hidden = false
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + 'px'
  tip.style.top = Math.max(4, Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)) + 'px'
}
export const hideTip = () => { tip.hidden = true }

export const empty = text => el('p', { class: 'empty' }, text)
export const pill = life => el('span', { class: `pill ${life}` }, { dead: 'controller gone', elsewhere: 'on another machine', unknown: 'not started' }[life] ?? life)

// columns: [title, class, cell(row), value(row)]; those with a value have a button that calls onsort(title). order: {by: title, down}.
export function table(rows, columns, { caption, rowClass, order, onsort } = {}) {
  const arrow = title => order?.by === title ? (order.down ? ' ↓' : ' ↑') : ''
  const head = ([title, kind, , value]) => el('th', { class: kind, scope: 'col', 'aria-sort': arrow(title) ? (order.down ? 'descending' : 'ascending') : null },
    value ? el('button', { type: 'button', class: 'sort', 'data-name': `sort ${title}`, 'aria-label': `Sort by ${title}`, onclick: () => onsort(title) }, title + arrow(title)) : title)
  return el('div', { class: 'scroll' }, el('table', {},
    caption ? el('caption', {}, caption) : null,
    el('thead', {}, el('tr', {}, columns.map(head))),
    el('tbody', {}, rows.map(row => el('tr', { class: rowClass?.(row) }, columns.map(([, kind, cell]) => el('td', { class: kind }, cell(row))))))))
}

export function spark(values) {
  const known = values.filter(value => value != null)
  if (known.length < 2) return el('span', { class: 'dim' }, '–')
  const low = Math.min(...known), high = Math.max(...known), space = 'http://www.w3.org/2000/svg'
  const svg = document.createElementNS(space, 'svg'), path = document.createElementNS(space, 'path')
  svg.setAttribute('class', 'spark'); svg.setAttribute('viewBox', '0 0 100 24'); svg.setAttribute('preserveAspectRatio', 'none')
  svg.setAttribute('role', 'img'); svg.setAttribute('aria-label', `from ${number(known[0])} to ${number(known.at(-1))}`)
  path.setAttribute('d', known.map((value, i) => `${i ? 'L' : 'M'}${(100 * i / (known.length - 1)).toFixed(1)} ${(22 - 20 * (value - low) / ((high - low) || 1)).toFixed(1)}`).join(''))
  svg.append(path)
  return svg
}

// The address of a view of runs, with its state: #/run/NAME[+NAME]/VIEW?state.
export function address(ids, name, state = {}) {
  const query = new URLSearchParams(Object.entries(state).filter(([, value]) => value !== '' && value != null)).toString()
  return `#/run/${ids.map(encodeURIComponent).join('+')}/${name}${query ? '?' + query : ''}`
}
