// Metrics by step, of one run or several, with the sentences about the run above them.
import { chart, legend } from './chart.js'
import { address, clock, el, empty, fill, keepFocus, number, ofRun, seconds, store } from './dom.js'

const SECTIONS = [
  ['Learning', name => /^(reward|loss|accuracy|perplexity|return|value|explained)/.test(name)],
  ['Episodes', name => /^(episode_(turns|branches|model_s|environment_s)$|environment\/|trained_term|parse_failure)/.test(name)],
  ['Health', name => /^(entropy|kl|mismatch|ratio|clip|grad|zero_var|truncated|response|staleness|learning_rate|skipped|advantage|groups|rows|data_term|episode)/.test(name)],
  ['Speed', name => /(_s$|per_s|idle|bytes|packing|members|terms|rollouts|decisions|memory|sync)/.test(name)],
  ['Other', () => true],
]
const FIRST = ['reward_mean', 'loss', 'reward_std', 'entropy', 'grad_norm', 'mismatch_kl', 'terms_per_s', 'step_s', 'policy_idle_fraction', 'rollout_idle_fraction']
const AXES = { step: 'step', time_s: 'time', terms: 'terms' }
const HIDDEN = new Set(['step', 'policy_version', 'time_s'])

export async function curves(view, ids, state) {
  const several = ids.length > 1
  let axis = AXES[state.axis] ? state.axis : store.get('axis', 'step'), low = state.low, high = state.high
  let smoothing = store.get('smoothing', .6), lines, over, filter = ''
  const charts = el('div'), top = el('div'), reset = el('button', { type: 'button', onclick: () => zoom() }, 'Whole run')
  const weight = el('input', { type: 'range', min: '0', max: '0.98', step: '0.02', value: String(smoothing), 'aria-label': 'Smoothing', oninput: event => { smoothing = Number(event.target.value); store.set('smoothing', smoothing); draw() } })
  const chosen = el('select', { 'aria-label': 'Horizontal axis', onchange: async event => { axis = event.target.value; store.set('axis', axis); low = high = undefined; await load(); draw() } }, Object.entries(AXES).map(([value, title]) => el('option', { value, selected: value === axis }, title)))
  const search = el('input', { type: 'search', placeholder: 'Filter metrics', 'aria-label': 'Filter metrics', oninput: event => { filter = event.target.value.toLowerCase(); draw() } })

  async function load() {
    const query = { axis, points: several ? 300 : 400, ...(low != null ? { low, high } : {}) }
    ;[over, lines] = await Promise.all([Promise.all(ids.map(id => ofRun(id, 'overview'))), Promise.all(ids.map(id => ofRun(id, 'curves', query)))])
  }
  async function zoom(from, to) { low = from; high = to; await load(); draw() }

  function head() {
    reset.hidden = low == null
    if (several) return top.replaceChildren(el('h1', {}, `${ids.length} runs`), legend(ids))
    const [run] = over, { outcome, start } = run
    const lengths = lines[0].series, last = name => lengths[name]?.mean.filter(value => value != null).at(-1)
    const stats = [['steps', run.steps], ['reward', last('reward_mean')], ['loss', last('reward_mean') == null ? last('loss') : null], ['terms per second', last('terms_per_s')], ['time', null, seconds(outcome.wall_s ?? undefined)]]
    const held = run.evaluations.filter(row => row['eval/reward_mean'] != null)
    if (held.length) stats.splice(2, 0, ['held-out reward', null, `${number(held[0]['eval/reward_mean'], 3)} → ${number(held.at(-1)['eval/reward_mean'], 3)}`])
    fill(top,
      el('h1', { class: 'sr' }, ids[0]),
      el('dl', { class: 'stats' }, stats.filter(([, value, text]) => value != null || (text && text !== '–')).map(([title, value, text]) => el('div', {}, el('dt', {}, title), el('dd', {}, text ?? number(value))))),
      el('ul', { class: 'health', 'aria-label': 'State of the run' }, run.health.map(finding => el('li', { class: finding.level }, finding.text, finding.key ? el('code', {}, `change ${finding.key}`) : null))),
      outcome.traceback ? el('details', {}, el('summary', {}, 'Traceback'), el('pre', { class: 'log' }, outcome.traceback)) : null,
      start.command ? el('p', { class: 'path' }, `${start.command.join(' ')} — ${start.host}, ${clock(start.started)}`) : null)
  }

  function draw() {
    head()
    const names = [...new Set(lines.flatMap(line => Object.keys(line.series)))].filter(name => !HIDDEN.has(name) && name.toLowerCase().includes(filter))
    const sections = SECTIONS.map(([title]) => [title, []])
    const rank = name => FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length
    names.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b))
    for (const name of names) sections[SECTIONS.findIndex(([, test]) => test(name))][1].push(name)
    const parts = sections.map(([title, members]) => [title, members.map(name => one(name))])
    const held = heldOut()
    if (held.length) parts.splice(1, 0, ['Held-out', held])
    const shown = parts.filter(([, members]) => members.length)
    keepFocus(charts, () => charts.replaceChildren(...shown.length ? shown.flatMap(([title, members]) => [el('h2', {}, title), el('div', { class: 'grid' }, members)]) : [empty(filter ? 'No metric has this name.' : 'No step is done yet.')]))
  }

  function one(name) {
    const found = lines.flatMap((line, index) => line.series[name] ? [{ index, label: ids[index], x: line.x, ...line.series[name] }] : [])
    return chart(found, { title: name, note: over.find(run => run.notes[name])?.notes[name], smoothing, group: axis, unit: /bytes/.test(name) ? 'bytes' : '', onzoom: zoom, onreset: () => zoom(), onpick: several || axis !== 'step' ? null : step => { location.hash = address(ids, 'rollouts', { step: Math.round(step) }) } })
  }

  function heldOut() {
    const names = [...new Set(over.flatMap(run => run.evaluations.flatMap(row => Object.keys(row))))].filter(name => name.startsWith('eval/') && name.toLowerCase().includes(filter))
    return names.flatMap(name => {
      const found = over.flatMap((run, index) => { const rows = run.evaluations.filter(row => row[name] != null); return rows.length ? [{ index, label: run.id, x: rows.map(row => row.policy_version), mean: rows.map(row => row[name]) }] : [] })
      return found.length ? [chart(found, { title: name, note: 'On held-out rows, by policy version', group: 'evaluations' })] : []
    })
  }

  await load()
  view.replaceChildren(top, el('div', { class: 'row' }, el('label', {}, 'over', chosen), el('label', {}, 'smoothing', weight), search, reset, el('span', { class: 'dim' }, 'drag to zoom, click a step for its rollouts')), charts)
  draw()
  const seen = () => JSON.stringify(over.map(run => [run.steps, run.status.life, run.evaluations.length]))
  return { async refresh() { const before = seen(); await load(); if (seen() !== before) draw() } }
}
