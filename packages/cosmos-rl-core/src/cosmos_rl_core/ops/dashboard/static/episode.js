// An episode in turns: what the model said and called, and what the environment answered, one under another.
import { el, number, seconds } from './dom.js'

const LONG = 600, LINES = 12, BEGINNING = 160, MANY = 8, EDGE = 3

// The first and the last turns of many, with those in between folded.
export function episode(exchanges) {
  const turns = exchanges.map((exchange, i) => turn(exchange, i, exchanges)), between = turns.length > MANY ? turns.splice(EDGE, turns.length - 2 * EDGE) : []
  if (between.length) turns.splice(EDGE, 0, el('li', {}, el('details', {}, el('summary', { class: 'dim' }, `${between.length} more turns`), el('ol', { class: 'episode' }, between))))
  return el('ol', { class: 'episode', 'aria-label': `${exchanges.length} ${exchanges.length === 1 ? 'turn' : 'turns'}` }, turns)
}

// What two episodes have to have in common to be shown as one.
export const said = exchanges => JSON.stringify((exchanges ?? []).map(({ model_s, environment_s, ...rest }) => rest))

function turn(exchange, i, exchanges) {
  const { text, reasoning, calls = [], problem, messages = [], reward, metrics, branch = 0, model_s, environment_s } = exchange
  const rewritten = i > 0 && branch !== (exchanges[i - 1].branch ?? 0)
  const about = [`turn ${i + 1}`, `model ${seconds(model_s)}`, `environment ${seconds(environment_s)}`, ...Object.entries(metrics ?? {}).map(([name, value]) => `${name} ${number(value, 3)}`)]
  return el('li', {},
    rewritten ? el('div', { class: 'warn' }, `history ${branch + 1}: what came before was rewritten`) : null,
    el('div', { class: 'dim' }, about.join(' · '), reward == null ? null : [' · ', el('b', { class: reward > 0 ? 'good' : reward < 0 ? 'bad' : '' }, `reward ${number(reward, 3)}`)]),
    reasoning ? el('details', { class: 'thoughts' }, el('summary', { class: 'dim' }, 'thoughts'), el('div', { class: 'text' }, reasoning)) : null,
    text || !(calls.length || problem) ? part('model', text) : null,
    calls.map(call => part('call', `${call.name} ${call.arguments}`)),
    problem ? el('div', { class: 'warn' }, `not a call: ${problem}`) : null,
    messages.map(({ role, name, content }) => part(name ? `${role} ${name}` : role, content)))
}

const part = (who, text) => el('div', { class: `part ${who.split(' ')[0]}` }, el('span', { class: 'dim' }, who), long(text))

// A long text, folded to its beginning.
function long(text) {
  if (text.length <= LONG && text.split('\n').length <= LINES) return el('div', { class: 'text' }, text || '(empty)')
  const first = text.slice(0, BEGINNING).split('\n').slice(0, 3).join('\n')
  return el('details', {}, el('summary', { class: 'text' }, `${first} …`, el('span', { class: 'dim' }, ` ${text.length.toLocaleString('en')} characters`)), el('div', { class: 'text' }, text))
}
