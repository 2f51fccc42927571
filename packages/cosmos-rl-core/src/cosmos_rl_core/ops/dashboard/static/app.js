// The page: routes #/run/NAME[+NAME]/VIEW?state, live events, keyboard. A view is a function (ids, state) -> what it
// does with changes and keys: {refresh(change), keys: {j() {}}, close()}.
import { $, address, el, get, hideTip, number, pill, showTip, store, table } from './dom.js'
import { curves } from './curves.js'
import { machines } from './machines.js'
import { rollouts } from './rollouts.js'
import { timeline } from './timeline.js'
import { logs, media, members, recipe, runs, weights } from './views.js'

const VIEWS = {
  curves: ['Curves', curves], rollouts: ['Rollouts', rollouts], timeline: ['Timeline', timeline], members: ['Members and waits', members],
  weights: ['Weights', weights], machines: ['Machines', machines], media: ['Media', media], recipe: ['Recipe', recipe], logs: ['Logs', logs],
}
const FOR_SEVERAL = ['curves', 'recipe']
const REFRESH_MS = 2000, LIST_MS = 5000
const view = $('#view')
let current = null, source = null, timer = null, turn = 0, missed = false, shown = null

function parse() {
  const [path, query] = location.hash.slice(2).split('?')
  const [kind, names = '', name = 'curves'] = path.split('/')
  return { ids: kind === 'run' && names ? names.split('+').map(decodeURIComponent) : [], name: VIEWS[name] ? name : 'curves', state: Object.fromEntries(new URLSearchParams(query ?? '')) }
}

// Media has a tab if the run has some, or if it is open.
const withMedia = new Set()
function tabs(ids, name) {
  const shows = key => ids.length === 1 ? key !== 'media' || key === name || withMedia.has(ids[0]) : FOR_SEVERAL.includes(key)
  $('#tabs').replaceChildren(...ids.length ? Object.entries(VIEWS).filter(([key]) => shows(key)).map(([key, [title]]) =>
    el('a', { href: address(ids, key), 'aria-current': key === name ? 'page' : null }, title)) : [])
  $('#tabs').hidden = !ids.length
  const tab = $('#tabs [aria-current]') // in the middle, where they do not all fit
  if (tab) $('#tabs').scrollLeft = tab.offsetLeft - $('#tabs').offsetLeft - ($('#tabs').clientWidth - tab.offsetWidth) / 2
}

async function route() {
  const mine = ++turn
  hideTip(); current?.close?.(); current = null; source?.close(); source = null; clearTimeout(timer); timer = null; missed = false; shown = null
  const { ids, name, state } = parse()
  $('#run').textContent = ids.join(' + ')
  $('#life').replaceChildren()
  tabs(ids, name)
  document.title = ids.length ? `${VIEWS[name][0]}, ${ids.join(' + ')}` : 'Cosmos-RL'
  const box = el('div') // of this route alone: a slow view that was left cannot overwrite the next one
  view.replaceChildren(box)
  try {
    const made = ids.length ? await VIEWS[name][1](box, ids, state) : await runs(box)
    if (mine !== turn) return made?.close?.()
    current = made
    if (ids.length === 1) listen(ids[0])
    else repeat(mine)
  } catch (error) {
    if (mine === turn) view.replaceChildren(el('p', { class: 'empty', role: 'alert' }, String(error.message)))
    console.error(error)
  }
}

// The list of runs and a comparison have no single run to listen to.
function repeat(mine) {
  timer = setTimeout(async () => {
    if (mine !== turn) return
    try { if (!document.hidden) await current?.refresh?.() } catch (error) { console.error(error) }
    if (mine === turn) repeat(mine)
  }, LIST_MS)
}

// Changes come once a second; a view is refreshed every two at most, and never while the page is hidden.
function listen(id) {
  let latest
  const refresh = async () => {
    timer = null
    if (document.hidden) return missed = true
    missed = false
    try { await current?.refresh?.(latest) } catch (error) { console.error(error) }
  }
  source = new EventSource(`/api/run/${encodeURIComponent(id)}/live`)
  source.addEventListener('change', event => {
    const change = latest = JSON.parse(event.data)
    const place = change.life === 'live' ? el('span', { class: 'dim' }, `${change.phase ?? ''}, step ${change.step ?? 0}`) : null
    $('#life').replaceChildren(el('span', { class: 'row' }, pill(change.life), place))
    if (change.has_media && !withMedia.has(id)) { withMedia.add(id); tabs([id], parse().name) }
    timer ??= setTimeout(refresh, REFRESH_MS)
  })
  shown = () => { if (missed) refresh() }
  source.onerror = () => $('#life').replaceChildren(el('span', { class: 'pill dead' }, 'no answer from the dashboard'))
}

function setTheme(name) {
  document.documentElement.dataset.theme = name
  localStorage.setItem('cosmos-rl.theme', name)
  $('#theme').textContent = name === 'dark' ? 'Light' : 'Dark'
}

const KEYS = [['1 … 9', 'view'], ['0', 'list of runs'], ['j / k', 'next or previous step of rollouts'], ['+ / −', 'zoom the timeline'], ['← / →', 'move in a chart or the timeline'], ['Enter', 'rollouts of the step under the cursor'], ['t', 'light or dark'], ['?', 'this list']]
function help() {
  const close = el('button', { type: 'button', onclick: () => $('#help').close() }, 'Close')
  $('#help').replaceChildren(el('h1', { id: 'help-title' }, 'Keyboard'), table(KEYS, [['Key', '', row => el('kbd', {}, row[0])], ['Action', '', row => row[1]]]), el('p', {}, close))
  $('#help').showModal()
}

addEventListener('hashchange', route)
document.addEventListener('visibilitychange', () => { if (!document.hidden) shown?.() })
addEventListener('keydown', event => {
  if (/INPUT|SELECT|TEXTAREA/.test(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey || $('#help').open) return
  const { ids } = parse(), names = [...document.querySelectorAll('#tabs a')]
  if (event.key === 't') $('#theme').click()
  else if (event.key === '?') help()
  else if (event.key === '0') location.hash = '#/'
  else if (ids.length && names[event.key - 1]) names[event.key - 1].click()
  else current?.keys?.[event.key]?.(event)
})
$('#theme').onclick = () => { setTheme(document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark'); route() }
$('#keys').onclick = help
$('#theme').textContent = document.documentElement.dataset.theme === 'dark' ? 'Light' : 'Dark'
$('.skip').onclick = event => { event.preventDefault(); view.focus() }
route()
