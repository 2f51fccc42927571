// The list of runs, members and waits, weights, media, recipe and logs.
import { chart, legend } from './chart.js'
import { address, bytes, clock, el, empty, fill, get, keepFocus, median, number, ofRun, pill, player, seconds, share, spark, store, table } from './dom.js'
import { level } from './rollouts.js'

export async function runs(view) {
  const chosen = new Set(store.get('chosen', []))
  const compare = el('button', { type: 'button', onclick: () => { location.hash = address([...chosen], 'curves') } })
  const count = () => { compare.disabled = chosen.size < 2; compare.textContent = chosen.size < 2 ? 'Choose two runs to compare' : `Compare ${chosen.size} runs` }
  const pick = run => el('input', { type: 'checkbox', 'data-name': run.id, 'aria-label': `Choose ${run.id}`, checked: chosen.has(run.id), onchange: event => { event.target.checked ? chosen.add(run.id) : chosen.delete(run.id); store.set('chosen', [...chosen]); count() } })
  const steps = run => [`${run.steps}${run.max_steps ? ` / ${run.max_steps}` : ''}`, run.max_steps ? el('progress', { max: run.max_steps, value: Math.min(run.steps, run.max_steps), 'aria-label': `${run.steps} of ${run.max_steps} steps` }) : null]
  const columns = [
    ['run', '', run => [el('a', { href: address([run.id], 'curves'), 'data-name': `open ${run.id}` }, el('b', {}, run.id)), el('div', { class: 'path' }, run.path)], run => run.id],
    ['state', '', run => pill(run.life), run => run.life],
    ['algorithm', 'wide', run => [run.algorithm, el('div', { class: 'dim' }, run.domain.split(':').at(-1))], run => run.algorithm],
    ['steps', '', steps, run => run.steps],
    ['reward or loss', 'n', run => `${run.metric === 'loss' ? 'loss ' : ''}${number(run.last, 3)}`, run => run.last],
    ['over time', 'wide', run => spark(run.spark)],
    ['held-out', 'n', run => run.held_out.length ? run.held_out.map(value => number(value, 3)).join(' → ') : '–', run => run.held_out.at(-1)],
    ['time', 'n wide', run => seconds(run.time_s ?? undefined), run => run.time_s],
  ]
  let found = [], order = store.get('order', {})
  const text = run => [run.id, run.path, run.life, run.algorithm, run.domain].join(' ').toLowerCase()
  // A column once, the other way round, and the first order again: live runs, then the newest.
  function sort(title) {
    order = order.by !== title ? { by: title, down: false } : order.down ? {} : { by: title, down: true }
    store.set('order', order)
    draw()
  }
  function compared(a, b) {
    const value = columns.find(([title]) => title === order.by)?.[3], [x, y] = value ? [value(a), value(b)] : []
    if (!value) return (b.life === 'live') - (a.life === 'live') || (b.started ?? 0) - (a.started ?? 0)
    if (x == null || y == null) return (x == null) - (y == null)
    return (order.down ? -1 : 1) * (typeof x === 'string' ? x.localeCompare(y, 'en', { numeric: true }) : x - y)
  }
  const search = el('input', { type: 'search', placeholder: 'Filter runs', 'aria-label': 'Filter runs', oninput: () => draw() }), matches = el('span', { class: 'dim' }), list = el('div')
  function draw() {
    const words = search.value.toLowerCase().split(/\s+/), shown = found.filter(run => words.every(word => text(run).includes(word))).sort(compared)
    matches.textContent = shown.length < found.length ? `${shown.length} of ${found.length} runs` : ''
    count()
    keepFocus(list, () => list.replaceChildren(!found.length ? empty('No run was found in these directories. A run appears here as soon as it has begun.') : !shown.length ? empty('No run matches.') :
      el('div', { class: 'card' }, table(shown, [...(found.length > 1 ? [['', '', pick]] : []), ...columns], { order, onsort: sort }))))
    controls.hidden = found.length < 2
  }
  const controls = el('div', { class: 'row' }, compare, search, matches)
  async function load() {
    found = await get('runs')
    for (const id of chosen) if (!found.some(run => run.id === id)) chosen.delete(id)
    draw()
  }
  view.replaceChildren(el('h1', {}, 'Runs'), controls, el('p', {}), list)
  await load()
  return { refresh: load }
}

const SAMPLES = { pending: 'waiting', leased: 'being generated', ready: 'ready to train', assigned: 'in the step', committed: 'trained', checkpointed: 'in a checkpoint', dropped: 'dropped' }

export async function members(view, [id]) {
  const box = el('div')
  const history = el('div')
  async function load() {
    const { status, history: past, waiting, events } = await ofRun(id, 'members'), now = status.members ?? [], waits = status.waits ?? []
    fill(box,
      el('dl', { class: 'flow card' }, Object.entries(SAMPLES).filter(([name]) => status.samples?.[name] != null).map(([name, title]) => el('div', {}, el('dt', {}, title), el('dd', {}, number(status.samples[name]))))),
      el('h2', {}, status.life === 'live' ? 'Members now' : 'Members at the end'),
      now.length ? el('div', { class: 'card' }, table(now, [['name', '', m => el('b', {}, m.name)], ['role', '', m => m.role], ['state', '', m => [el('span', { class: `pill ${m.state === 'ready' ? 'live' : m.state === 'suspect' ? 'dead' : ''}` }, m.state), m.phase ? ` ${m.phase} ${seconds(m.phase_s)}` : '']], ['weights', 'n', m => m.version >= 0 ? `version ${m.version}` : '–'], ['since', 'n', m => seconds(m.since_s)], ['last heartbeat', 'n', m => `${seconds(m.age_s)} ago`], ['progress', 'n', m => number(m.progress || 0)]])) : empty('No worker is connected.'),
      el('h2', {}, 'Who waits for whom'),
      el('div', { class: 'card' }, [waits.length ? el('ul', {}, waits.map(wait => el('li', {}, typeof wait === 'string' ? wait : JSON.stringify(wait)))) : el('p', { class: 'dim' }, 'Nobody waits.'),
        waiting.length ? table(waiting.slice(0, 12), [['', '', row => el('b', {}, row.process)], ['waits', '', row => row.wait.replace('wait ', '')], ['now', 'n', row => row.now_s == null ? '–' : seconds(row.now_s)], ['in all', 'n', row => seconds(row.total_s)], ['share of its time', 'n', row => share(row.share)]], { caption: 'From the spans of the processes, as in the timeline' }) : null]))
    const at = past.map(row => row.at), states = Object.keys(SAMPLES).filter(name => past.some(row => row.samples[name]))
    keepFocus(history, () => history.replaceChildren(...past.length > 1 ? [
      el('h2', {}, 'Samples over time', el('small', {}, 'seconds since the start')), el('div', { class: 'grid' }, states.filter(name => !['committed', 'checkpointed'].includes(name)).map(name => chart([{ label: name, x: at, mean: past.map(row => row.samples[name] ?? 0) }], { title: SAMPLES[name], group: 'status' }))),
    ] : [], el('h2', {}, 'Events'), events.length ? el('div', { class: 'card' }, eventTable(events)) : empty('This run has no events.jsonl.')))
  }
  view.replaceChildren(el('h1', {}, 'Members and waits'), box, history)
  await load()
  return { refresh: load }
}

const eventTable = events => table([...events].reverse().slice(0, 200), [['time', '', event => el('span', { class: 'mono' }, clock(event.time))], ['step', 'n', event => event.step], ['kind', '', event => event.kind], ['', '', event => event.text]])

export async function weights(view, [id]) {
  const body = el('div')
  async function load() {
    const pulls = await ofRun(id, 'weights'), links = new Map()
    for (const pull of pulls) links.set(pull.to, [...links.get(pull.to) ?? [], pull])
    if (!links.size) return body.replaceChildren(empty('No weights were sent yet. Supervised runs send none.'))
    const rows = [...links], of = (list, key) => list.map(pull => pull[key]).filter(value => value != null), sum = values => values.length ? values.reduce((a, b) => a + b, 0) : null
    const line = key => rows.flatMap(([to, list], index) => { const known = list.filter(pull => pull[key] != null && pull.version > 0); return known.length ? [{ index, label: to, x: known.map(pull => pull.version), mean: known.map(pull => pull[key]) }] : [] })
    const charts = [['delay_s', 'published to live, s'], ['pull_s', 'transfer, s'], ['switch_s', 'switch, s'], ['bytes', 'bytes received', 'bytes']]
    body.replaceChildren(el('div', { class: 'card' }, table(rows, [
      ['from', '', row => el('span', { class: 'mono' }, row[1].at(-1).source ?? '–')], ['to', '', row => el('b', {}, row[0])], ['versions', 'n', row => row[1].length], ['newest', 'n', row => row[1].at(-1).version],
      ['bytes a version', 'n', row => bytes(median(of(row[1], 'bytes')))], ['all', 'n', row => bytes(sum(of(row[1], 'bytes')))], ['buckets as deltas', 'n', row => number(sum(of(row[1], 'deltas')))], ['repaired', 'n', row => number(sum(of(row[1], 'repaired')))],
      ['transfer', 'n', row => seconds(median(of(row[1], 'pull_s')))], ['switch', 'n', row => seconds(median(of(row[1], 'switch_s')))], ['published to live', 'n', row => seconds(median(of(row[1], 'delay_s')))],
    ], { caption: 'One line a link; times and bytes a version are medians' })), el('h2', {}, 'By version'), legend(rows.map(([to]) => to)), el('p', {}), el('div', { class: 'grid' }, charts.flatMap(([key, title, unit]) => { const lines = line(key); return lines.length ? [chart(lines, { title, unit, group: 'versions' })] : [] })))
  }
  view.replaceChildren(el('h1', {}, 'Weights'), body)
  await load()
  return { refresh: load }
}

export async function media(view, [id]) {
  const found = await ofRun(id, 'media')
  if (!found.length) { view.replaceChildren(el('h1', {}, 'Media'), empty('No pictures, videos or episodes. [logging] media_every writes them, for domains that have them.')); return {} }
  const kinds = [...new Set(found.map(row => row.kind))], rewards = found.flatMap(row => (row.rollouts ?? []).map(rollout => rollout.reward)).filter(value => value != null)
  const low = Math.min(...rewards), high = Math.max(...rewards), body = el('div')
  const choice = el('select', { 'aria-label': 'Kind', onchange: () => draw() }, kinds.map(kind => el('option', { value: kind }, kind)))
  function draw() {
    const rows = found.filter(row => row.kind === choice.value), steps = [...new Set(rows.map(row => row.step))]
    body.replaceChildren(...steps.flatMap(step => [el('h2', {}, `Weights of version ${step}`), el('div', { class: 'gallery' }, rows.filter(row => row.step === step).map(card))]))
  }
  function card(row) {
    const caption = String(row.caption ?? row.prompt ?? `sample ${row.sample}`), shown = player(id, row, caption)
    if (row.prompt_media) return el('article', { class: 'card' }, el('p', {}, el('b', {}, caption)), shown, [...row.rollouts ?? []].sort((a, b) => (b.reward ?? 0) - (a.reward ?? 0)).map(rollout => el('div', { class: 'answer' }, el('span', { class: `reward ${level(rollout.reward, low, high)}` }, number(rollout.reward, 3)), el('span', { class: 'mono' }, rollout.response || '(empty)'))))
    return el('article', { class: 'card' }, el('p', {}, el('b', {}, caption)), shown, el('div', { class: 'row' }, [...row.rollouts ?? []].sort((a, b) => (b.reward ?? 0) - (a.reward ?? 0)).map(rollout => el('span', { class: `reward ${level(rollout.reward, low, high)}`, title: Object.entries(rollout.rewards ?? {}).map(([name, value]) => `${name} ${number(value, 3)}`).join(', ') }, number(rollout.reward, 3)))))
  }
  view.replaceChildren(el('h1', {}, 'Media'), el('div', { class: 'row' }, choice, found.some(row => row.file.endsWith('.mp4')) ? el('span', { class: 'dim' }, 'In a video the rollouts of a group are side by side.') : null), body)
  draw()
  return {}
}

const flat = (value, prefix = '') => Object.entries(value).flatMap(([key, held]) => held && typeof held === 'object' && !Array.isArray(held) ? flat(held, `${prefix}${key}.`) : [[prefix + key, JSON.stringify(held)]])

export async function recipe(view, ids) {
  const recipes = await Promise.all(ids.map(id => ofRun(id, 'recipe'))), tables = recipes.map(found => new Map(flat(found))), keys = [...new Set(tables.flatMap(found => [...found.keys()]))]
  const differs = key => new Set(tables.map(found => found.get(key))).size > 1
  const search = el('input', { type: 'search', placeholder: 'Filter keys', 'aria-label': 'Filter keys', oninput: () => draw() }), only = el('input', { type: 'checkbox', checked: ids.length > 1, onchange: () => draw() }), body = el('div', { class: 'card' })
  function draw() {
    const shown = keys.filter(key => key.toLowerCase().includes(search.value.toLowerCase()) && (ids.length === 1 || !only.checked || differs(key)))
    body.replaceChildren(shown.length ? table(shown, [['key', 'mono key', key => key], ...ids.map((id, i) => [ids.length > 1 ? id : 'value', 'mono', key => tables[i].get(key) ?? '–'])], { rowClass: key => ids.length > 1 && differs(key) ? 'different' : '' }) : el('span', { class: 'dim' }, keys.length ? 'No key matches: the recipes are equal here.' : 'There is no resolved.toml.'))
  }
  view.replaceChildren(el('h1', {}, 'Recipe', el('small', {}, 'every key that applies, defaults included')), el('div', { class: 'row' }, search, ids.length > 1 ? el('label', {}, only, 'only differences') : null), el('p', {}), body)
  draw()
  return {}
}

export async function logs(view, [id]) {
  const body = el('div'), boxes = new Map()
  function add(name) {
    const size = el('span', { class: 'dim' }), pre = el('pre', { class: 'log', tabindex: '0', 'aria-label': name })
    body.append(el('details', { open: true }, el('summary', {}, el('b', {}, name), size), pre))
    boxes.set(name, { size, pre })
    return boxes.get(name)
  }
  // A log that is read at its end follows its new lines; one that was scrolled up or closed stays as it is.
  async function load() {
    const found = await ofRun(id, 'logs')
    if (found.length !== boxes.size) body.querySelector('.empty')?.remove()
    for (const log of found) {
      const { size, pre } = boxes.get(log.name) ?? add(log.name), atEnd = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 4
      size.textContent = ` ${bytes(log.bytes)}`
      if (pre.textContent !== (log.text || '(empty)')) pre.textContent = log.text || '(empty)'
      if (atEnd) pre.scrollTop = pre.scrollHeight
    }
    if (!found.length) body.replaceChildren(empty('This run has no logs.'))
  }
  view.replaceChildren(el('h1', {}, 'Logs', el('small', {}, 'the last 64 kB of each')), body)
  await load()
  return { refresh: load }
}
