// Machines of a run and its processes: processors, memory, network, disk, GPUs.
import { chart, legend } from './chart.js'
import { bytes, el, empty, number, ofRun, table } from './dom.js'

const MOST_LINES = 8

export async function machines(view, [id]) {
  const body = el('div')
  async function load() {
    const found = await ofRun(id, 'machines')
    body.replaceChildren(...found.processes.length ? [...found.machines.flatMap(machine), ...processes(found.processes)] : [empty('This run has no files in system/.')])
  }
  view.replaceChildren(el('h1', {}, 'Machines'), body)
  await load()
  return { refresh: load }
}

function machine(found) {
  const one = (key, title, unit, note) => chart([{ label: title, x: found.at, mean: found[key] }], { title, unit, note, group: 'machines' })
  const gpus = (key, title, unit) => chart(found.gpus.map(gpu => ({ label: `GPU ${gpu.index}`, x: found.at, mean: gpu[key] })), { title, unit, group: 'machines' })
  const kinds = [...new Set(found.gpus.map(gpu => `${gpu.name}, ${bytes(gpu.memory_total)}`))]
  const about = [`${found.cpus} processors`, `${bytes(found.memory_total)} of memory`, `disk of ${bytes(found.disk_total)}`, found.gpus.length ? `${found.gpus.length} × ${kinds.join('; ')}` : 'no GPU']
  return [
    el('h2', {}, found.host, el('small', {}, about.join(', '))),
    el('div', { class: 'grid' },
      one('cpu', 'processors busy', '', `of ${found.cpus}`), one('memory', 'memory in use', 'bytes', `of ${bytes(found.memory_total)}`),
      found.gpus.length ? [gpus('busy', 'GPUs busy, share of the time'), gpus('memory', 'GPU memory in use', 'bytes')] : null,
      one('received', 'received, bytes a second', 'bytes'), one('sent', 'sent, bytes a second', 'bytes'), one('disk_free', 'disk free', 'bytes')),
    found.gpus.length > 1 ? legend(found.gpus.map(gpu => `GPU ${gpu.index}`)) : el('span'),
  ]
}

function processes(found) {
  const largest = [...found].sort((a, b) => b.largest - a.largest), drawn = largest.slice(0, MOST_LINES), last = values => values.at(-1)
  const lines = key => drawn.map((row, index) => ({ index, label: row.process, x: row.at, mean: row[key] }))
  return [
    el('h2', {}, 'Processes', el('small', {}, 'with the processes that they have started, such as simulators')),
    el('div', { class: 'card' }, table(largest, [['name', '', row => el('b', {}, row.process)], ['machine', '', row => row.host], ['processes', 'n', row => row.processes], ['processors', 'n', row => number(last(row.cpu), 3)], ['memory', 'n', row => bytes(last(row.memory))], ['most memory', 'n', row => bytes(row.largest)]])),
    el('p', {}), legend(drawn.map(row => row.process)), el('p', {}),
    el('div', { class: 'grid' }, chart(lines('memory'), { title: 'memory', unit: 'bytes', group: 'machines' }), chart(lines('cpu'), { title: 'processors busy', group: 'machines' })),
  ]
}
