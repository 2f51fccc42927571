// Rollouts of one step: histogram of rewards, filters, groups, and one prompt through time.
import { chart } from './chart.js'
import { address, el, empty, number, ofRun, player, store } from './dom.js'
import { episode, said } from './episode.js'

const SORTS = { file: 'as trained', worst: 'lowest reward', best: 'highest reward', mixed: 'most mixed', longest: 'longest' }
const KINDS = { step: 'training', eval: 'evaluations' }
const SHADES = { probability: 'probability', advantage: 'advantage', version: 'version of the weights' }
const PAGE = 20

export const level = (value, low, high) => value == null || high === low ? '' : (value - low) / (high - low) > .66 ? 'high' : (value - low) / (high - low) < .34 ? 'low' : 'middle'

export async function rollouts(view, [id], state) {
  const [files, media] = await Promise.all([ofRun(id, 'rollouts/files'), ofRun(id, 'media')])
  const videos = new Map(media.filter(row => !row.prompt_media).map(row => [row.kind === 'evaluation' ? `${row.step}/${row.sample}` : `${row.sample}`, row]))
  const kinds = Object.keys(files)
  if (!kinds.length) { view.replaceChildren(el('h1', {}, 'Rollouts'), empty('No step has written its rollouts yet ([logging] rollouts_every).')); return {} }
  let kind = files[state.kind] ? state.kind : kinds.includes('step') ? 'step' : kinds[0]
  let step = nearest(files[kind], state.step == null ? files[kind].at(-1) : Number(state.step))
  const kept = new Map(media.filter(row => row.prompt_media).map(row => [Object.values(row.prompt_media).join(), row.file]))
  let range = null, text = state.text ?? '', sort = SORTS[state.sort] ? state.sort : 'file', at = 0, data = null, follow = state.step == null, by = SHADES[store.get('tokens')] ? store.get('tokens') : 'probability'

  const slider = el('input', { type: 'range', min: '0', 'aria-label': 'Step', oninput: () => { follow = false; go(files[kind][slider.value]) } })
  const title = el('h1', {}), shown = el('div'), bars = el('div'), through = el('div')
  const choice = el('select', { 'aria-label': 'Kind', onchange: event => { kind = event.target.value; go(files[kind].at(-1)) } }, kinds.map(name => el('option', { value: name, selected: name === kind }, KINDS[name] ?? name)))
  const order = el('select', { 'aria-label': 'Order', onchange: event => { sort = event.target.value; at = 0; load() } }, Object.entries(SORTS).map(([value, name]) => el('option', { value, selected: value === sort }, name)))
  const shading = el('select', { 'aria-label': 'Colour of tokens', onchange: event => { by = event.target.value; store.set('tokens', by); draw() } }, Object.entries(SHADES).map(([value, name]) => el('option', { value, selected: value === by }, name)))
  const search = el('input', { type: 'search', placeholder: 'Text of a prompt or answer', 'aria-label': 'Filter by text', value: text, onchange: event => { text = event.target.value; at = 0; load() } })
  const move = by => { const steps = files[kind]; follow = false; go(steps[Math.max(0, Math.min(steps.length - 1, steps.indexOf(step) + by))]) }
  const go = to => { step = to; at = 0; range = null; history.replaceState(null, '', address([id], 'rollouts', { kind, step, sort, text })); load() }

  async function load() {
    slider.max = String(files[kind].length - 1)
    slider.value = String(files[kind].indexOf(step))
    title.replaceChildren(kind === 'eval' ? `Evaluation of version ${step}` : `Rollouts of step ${step}`)
    try {
      data = await ofRun(id, 'rollouts', { kind, step, sort, text, at, count: PAGE, ...(range ? { low: range[0], high: range[1] } : {}) })
    } catch (error) { return shown.replaceChildren(empty(error.message)) }
    draw()
  }

  function draw() {
    const { histogram: h, groups } = data, most = Math.max(1, ...h.bins), width = (h.high - h.low) / h.bins.length
    const bin = (count, i) => {
      const low = h.low + i * width, high = i === h.bins.length - 1 ? h.high : low + width
      const bar = el('i'); bar.style.height = `${count ? Math.max(3, 100 * count / most) : 0}%`
      const on = range && range[0] <= low + 1e-9 && range[1] >= high - 1e-9
      return el('button', { type: 'button', 'aria-pressed': String(Boolean(on)), 'aria-label': `reward ${number(low, 3)} to ${number(high, 3)}: ${count} rollouts`, title: `${number(low, 3)} to ${number(high, 3)}: ${count}`, onclick: () => { range = on ? null : [low, high]; at = 0; load() } }, bar)
    }
    bars.replaceChildren(...h.bins.length ? [el('div', { class: 'histogram', role: 'group', 'aria-label': 'Histogram of rewards' }, h.high > h.low ? h.bins.map(bin) : [bin(h.bins[0], 0)]), el('div', { class: 'scale' }, el('span', {}, number(h.low, 3)), el('span', {}, 'reward'), el('span', {}, number(h.high, 3)))] : [])
    const last = Math.min(data.total_groups, at + PAGE)
    const pages = el('div', { class: 'row' },
      el('button', { type: 'button', disabled: at === 0, onclick: () => { at = Math.max(0, at - PAGE); load() } }, 'Previous'),
      el('span', { class: 'dim' }, `groups ${data.total_groups ? at + 1 : 0} to ${last} of ${data.total_groups}; ${data.total} of ${data.of} rollouts`),
      el('button', { type: 'button', disabled: last >= data.total_groups, onclick: () => { at += PAGE; load() } }, 'Next'))
    shown.replaceChildren(pages, ...groups.map(group => card(group, h)), groups.length ? '' : empty('No rollout matches the filters.'))
  }

  function card(group, h) {
    const equal = new Map(), shown = videos.get(kind === 'eval' ? `${step}/${group.sample}` : `${group.sample}`)
    for (const rollout of group.rollouts) {
      const key = `${rollout.response}\n${rollout.reward}\n${rollout.shown}\n${said(rollout.exchanges)}`
      const alone = rollout.terms && !rollout.exchanges  // its tokens are shown
      equal.has(key) && !alone ? equal.get(key).count++ : equal.set(alone ? rollout : key, { rollout, count: 1 })
    }
    return el('article', { class: 'card group', 'aria-label': `Group of sample ${group.sample}` },
      el('div', { class: 'row' },
        el('span', { class: `reward ${level(group.mean, h.low, h.high)}`, title: 'mean reward of the group' }, number(group.mean, 3)),
        pictures(group),
        group.turns.length ? chat(group) : el('pre', { class: 'prompt' }, folded(group.prompt)),
        el('span', { class: 'dim mono' }, `#${group.sample}`),
        el('button', { type: 'button', onclick: () => time(group) }, 'Through time')),
      shown ? player(id, shown, `sample ${group.sample}`) : null,
      [...equal.values()].map(({ rollout, count }) => line(rollout, count, h)))
  }

  function line(rollout, count, h) {
    const parts = Object.entries(rollout.rewards ?? {}).map(([name, value]) => `${name} ${number(value, 3)}`)
    const versions = (rollout.versions ?? []).filter((value, i, all) => all.indexOf(value) === i).join('–')
    return el('div', { class: `rollout ${rollout.shown ? '' : 'faded'}` },
      el('div', {}, el('span', { class: `reward ${level(rollout.reward, h.low, h.high)}` }, number(rollout.reward, 3)), count > 1 ? el('b', {}, ` ×${count}`) : null,
        el('div', { class: 'dim' }, `advantage ${number(rollout.advantage, 3)}`, el('br'), `${rollout.num_terms} terms${versions ? `, version ${versions}` : ''}`),
        rollout.finish_reason && rollout.finish_reason !== 'stop' ? el('div', { class: 'warn' }, rollout.finish_reason === 'length' ? 'cut off' : rollout.finish_reason) : null),
      el('div', {}, answer(rollout), parts.length > 1 ? el('div', { class: 'dim' }, parts.join(', ')) : null))
  }

  // Turns of an episode with its tokens folded, tokens, or text.
  function answer({ exchanges, terms, advantage, response }) {
    if (!exchanges) return terms ? tokens(terms, advantage, by) : el('div', { class: 'text' }, response || blank(data.groups))
    return [episode(exchanges), terms ? el('details', {}, el('summary', { class: 'dim' }, 'tokens, as the model saw them'), tokens(terms, advantage, by)) : null]
  }

  // A prompt of several messages: role and text of each, and the text that the model saw.
  const chat = ({ turns, prompt }) => el('div', { class: 'prompt' },
    el('dl', { class: 'turns' }, turns.flatMap(([role, text]) => [el('dt', { class: 'dim' }, role), el('dd', {}, text)])),
    el('details', {}, el('summary', { class: 'dim' }, 'as the model saw it'), el('pre', {}, folded(prompt))))

  // Pictures and videos of the prompt: from the gallery where it has them, and their names.
  function pictures({ prompt_media }) {
    const names = Object.values(prompt_media ?? {})
    if (!names.length) return null
    const file = kept.get(names.join()), label = names.join(', ')
    return el('figure', { class: 'shown' }, file ? el('img', { src: `/api/run/${encodeURIComponent(id)}/media/${file.split('/').map(encodeURIComponent).join('/')}`, loading: 'lazy', alt: label }) : null, el('figcaption', { class: 'dim mono' }, label))
  }

  async function time({ prompt, sample }) {
    through.replaceChildren(el('p', { class: 'dim', role: 'status' }, 'reading all steps …'))
    through.scrollIntoView({ block: 'nearest' })
    const found = (await ofRun(id, 'prompt', { kind, step, sample })).filter(group => group.rollouts.length)
    const mean = group => { const known = group.rollouts.map(r => r.reward).filter(r => r != null); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null }
    const trained = found.filter(group => group.kind === 'step')
    const answers = group => { const counts = new Map(); for (const { response } of group.rollouts) counts.set(response, (counts.get(response) ?? 0) + 1); return [...counts].sort((a, b) => b[1] - a[1]).slice(0, 3) }
    through.replaceChildren(el('section', { class: 'card', 'aria-label': 'One prompt through time' },
      el('div', { class: 'row' }, el('h2', {}, 'This prompt through time', el('small', {}, found.length === 1 ? '1 group' : `${found.length} groups`)), el('span', { class: 'grow' }), el('button', { type: 'button', onclick: () => through.replaceChildren() }, 'Close')),
      el('pre', { class: 'mono' }, folded(prompt)),
      trained.length > 1 ? chart([{ label: 'mean reward', x: trained.map(group => group.step), mean: trained.map(mean) }], { title: 'mean reward of the group', group: 'prompt' }) : null,
      found.map(group => el('div', { class: 'rollout' },
        el('div', {}, el('a', { href: address([id], 'rollouts', { kind: group.kind, step: group.step }) }, group.kind === 'eval' ? `evaluation ${group.step}` : `step ${group.step}`), el('div', { class: 'dim' }, `mean reward ${number(mean(group), 3)}`)),
        el('div', { class: 'text' }, answers(group).map(([answer, count]) => el('div', {}, count > 1 ? el('b', {}, `×${count} `) : null, answer || blank(found))))))))
    through.firstElementChild.scrollIntoView({ block: 'start' })
  }

  view.replaceChildren(title, el('div', { class: 'row' }, choice, el('button', { type: 'button', onclick: () => move(-1), 'aria-label': 'Previous step' }, '←'), slider, el('button', { type: 'button', onclick: () => move(1), 'aria-label': 'Next step' }, '→'), el('label', {}, 'order', order), el('label', {}, 'tokens by', shading), search), bars, through, shown)
  await load()
  return {
    keys: { j: () => move(1), k: () => move(-1) },
    async refresh() {
      Object.assign(files, await ofRun(id, 'rollouts/files'))
      slider.max = String(files[kind].length - 1)
      if (follow && files[kind].at(-1) !== step && !through.childElementCount) { step = files[kind].at(-1); await load() }
    },
  }
}

// A token that a prompt repeats for each part of a picture, once with its number.
const folded = prompt => String(prompt).replace(/(<[^<>\s]{1,40}>)(\s*\1){3,}/g, (all, token) => `${token} ×${all.split(token).length - 1}`)

// An answer without text, in a run whose rollouts have text at all.
const blank = groups => groups.some(group => group.rollouts.some(rollout => rollout.response)) ? '(empty)' : ''

const nearest = (steps, wanted) => steps.reduce((best, step) => Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best, steps[0])

// Tokens of a rollout in one of SHADES. An advantage is written where terms of a rollout differ in it, a mask where some are
// not trained on.
function tokens({ texts, logprobs, versions, advantages, mask }, advantage, by) {
  const of = i => advantages ? advantages[i] : advantage, most = Math.max(1e-9, ...texts.map((_, i) => Math.abs(of(i) ?? 0)))
  const shade = i => {
    const probability = logprobs[i] == null ? 1 : Math.exp(logprobs[i])
    if (by === 'probability') return `p${[.9, .6, .3, .1].filter(limit => probability <= limit).length}`
    if (by === 'version') return `v${(versions[i] - Math.min(...versions)) % 2}`
    return of(i) == null ? 'p0' : `${of(i) < 0 ? 'n' : 'g'}${Math.round(4 * Math.abs(of(i)) / most)}`
  }
  const about = i => [`${JSON.stringify(texts[i])}: probability ${logprobs[i] == null ? 'unknown' : number(Math.exp(logprobs[i]), 3)}`, `version ${versions[i]}`, of(i) == null ? null : `advantage ${number(of(i), 3)}`, mask && !mask[i] ? 'not trained on' : null].filter(Boolean).join(', ')
  const note = el('div', { class: 'dim', 'aria-live': 'polite' })
  const spans = texts.map((text, i) => el('span', { class: `token ${shade(i)} ${mask && !mask[i] ? 'masked' : ''}`, title: about(i) }, text))
  let at = 0
  const choose = to => { spans[at].classList.remove('chosen'); at = Math.max(0, Math.min(spans.length - 1, to)); spans[at].classList.add('chosen'); note.textContent = about(at) }
  const box = el('div', { class: 'text', tabindex: '0', role: 'group', 'aria-label': `${texts.length} tokens; arrow keys read them one by one`, onfocus: () => choose(at), onkeydown: event => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key]
    if (move) { choose(at + move); event.preventDefault() }
  } }, spans)
  return [box, note]
}
