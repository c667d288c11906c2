// A client of replicad for Node 20 and newer: one file, no packages. See protocol.md.
//
//     import { follow, work } from './replicad.mjs'
//
//     for await (const event of follow('127.0.0.1:9009', 'events', { token: 'EARLIEST' })) {
//       if (event.type === 'rows') save(event.rows, event.token)      // together, in one transaction
//       else discard(event.instance, event.above)                     // 'reset': history forked, or rows expired
//     }
//
//     await work('127.0.0.1:9009', 'cities', async (ids, pod) => { await index(ids) })
// An address may name several daemons, `host1:9009,host2:9009`: the first that answers is used.
// As a program it prints JSON lines:  node replicad.mjs follow HOST:PORT STREAM [TOKEN]
//                                     node replicad.mjs work HOST:PORT TUBE [PARTITION/PARTITIONS]

import net from 'node:net'
import tls from 'node:tls'
import { pathToFileURL } from 'node:url'

const PING_EVERY = 4_000 // ms; protocol.md wants a command every 5 s
const SILENT = 15_000 // ms without a line after which the server is given up
const CONNECT = 5_000 // ms for a connection, TLS and SERVER
const CONNECT_ONE_OF_SEVERAL = 800 // ms, where another address could answer instead
const MAX_LINE = 64 << 20 // bytes; the longest row that a server sends by default
const MAX_BATCH_ROWS = 1_000_000 // of one token
const MAX_BATCH = 1 << 28 // characters of these rows
const MAX_UNLISTED = 100_000 // writers outside of WRITERS whose positions are kept
const FIRST_PAUSE = 100 // ms before the next try, which doubles up to MAX_PAUSE
const MAX_PAUSE = 5_000
const TOKEN_REFUSALS = 8 // in a row of a token that is ahead: the daemon may lag behind the one before
const UNKNOWN = -(1n << 63n) - 1n // below every position

/**
 * @typedef {object} Options
 * @property {string} [token]    where to begin: NOW (the default), EARLIEST, or a token that was kept
 * @property {string} [secret]   for AUTH
 * @property {string} [name]     in the daemon's lists
 * @property {import('node:tls').ConnectionOptions} [tls]   connect with TLS
 * @property {AbortSignal} [signal]   ends the following or the work
 * @property {(error: Error, retryInMs: number) => void} [onDisconnect]
 * @typedef {{type: 'rows', stream: string, instance: string, at: bigint, token: string, rows: string[]}} Rows
 *   `rows`: JSON texts. `token`: where to go on after these rows; keep it together with their effect.
 * @typedef {{type: 'reset', stream: string, instance: string | null, above: bigint | null, token: string, reason: string}} Reset
 *   Discard the rows of `instance` (null: of all writers) above `above` (null: all rows).
 * @typedef {Options & {partition?: string, ttl?: number, limit?: number, tries?: number}} WorkOptions
 *   `partition`: `0/4` is the first of four; `0/1`, the default, is the whole tube. `ttl`: seconds of the lease. `limit`:
 *   pods in one answer. `tries` of a pod that fails, before it is parked.
 * @typedef {{seq: number, op: string, shard: number, ids: (number | string)[], ts: string, payload?: unknown}} Pod
 */

/** An ERROR of the server: a code and a sentence; or `protocol`, if the server breaks it. */
export class ReplicadError extends Error {
  /** @param {string} code @param {string} sentence */ constructor(code, sentence) {
    super(`${code}: ${sentence}`)
    this.code = code
    this.sentence = sentence
  }
}

/** The connection is lost or could not be made. Another try may help. */
export class ConnectionLost extends Error {}

/** @param {string} text of an ERROR */ function refusal(text) {
  const found = /^([a-z_]+): (.*)$/s.exec(text)
  return found ? new ReplicadError(found[1], found[2]) : new ConnectionLost(text || 'the server sent ERROR')
}

/** @param {number} ms @param {AbortSignal} [signal] */ function sleep(ms, signal) {
  return new Promise((resolve) => {
    const end = () => { clearTimeout(timer); signal?.removeEventListener('abort', end); resolve(undefined) }
    const timer = setTimeout(end, signal?.aborted ? 0 : ms)
    signal?.addEventListener('abort', end)
  })
}

/** One connection, in lines. Sends PINGs; ends when the server is silent. */
class Connection {
  /** @param {net.Socket} socket @param {string} address */ constructor(socket, address) {
    this.socket = socket
    this.address = address
    /** @type {string[]} */ this.lines = [] // received, not taken yet
    /** @type {Buffer[]} */ this.pieces = [] // of a line that has not ended
    this.size = 0
    /** @type {Error | null} */ this.error = null
    /** @type {(() => void) | null} */ this.wake = null
    this.sent = this.heard = Date.now()
    this.pings = false
    socket.on('data', (data) => this.#receive(data))
    socket.on('error', (error) => this.close(new ConnectionLost(`${address}: ${error.message}`)))
    socket.on('close', () => this.close(new ConnectionLost(`${address} closed the connection`)))
    this.timer = setInterval(() => this.#tick(), 500)
  }

  /** @param {Buffer} data */ #receive(data) {
    let begin = 0
    for (let end = data.indexOf(10); end >= 0; end = data.indexOf(10, begin)) {
      this.pieces.push(data.subarray(begin, end))
      const line = (this.pieces.length === 1 ? this.pieces[0] : Buffer.concat(this.pieces)).toString('utf8')
      this.pieces = []
      this.size = 0
      begin = end + 1
      const text = line.endsWith('\r') ? line.slice(0, -1) : line
      if (text.trim()) this.lines.push(text)
    }
    if (begin < data.length) {
      this.pieces.push(data.subarray(begin))
      this.size += data.length - begin
      if (this.size > MAX_LINE) this.close(new ReplicadError('protocol', `a line has more than ${MAX_LINE} bytes`))
    }
    this.heard = Date.now()
    if (this.lines.length > 10_000) this.socket.pause() // until they are taken
    this.wake?.()
  }

  #tick() {
    const now = Date.now()
    if (now - this.sent >= PING_EVERY) this.send(`PING ${now}`)
    if (this.socket.isPaused()) this.heard = now
    if (this.pings && now - this.heard >= SILENT) this.close(new ConnectionLost(`${this.address} fell silent`))
  }

  /** @param {string[]} lines */ send(...lines) {
    this.sent = Date.now()
    if (!this.error) this.socket.write(lines.map((line) => `${line}\n`).join(''))
  }

  /** The next line that is not a PING. */
  async line() {
    for (;;) {
      const line = this.lines.shift()
      if (line === undefined) {
        if (this.error) throw this.error
        this.socket.resume()
        await new Promise((resolve) => { this.wake = () => resolve(undefined) })
        this.wake = null
      } else if (line === 'PING' || line.startsWith('PING ')) this.pings = true
      else return line
    }
  }

  /** @param {Error} [error] */ close(error = new ConnectionLost('closed')) {
    this.error ??= error
    clearInterval(this.timer)
    this.socket.destroy()
    this.wake?.()
  }
}

/** @param {string} address @param {Options | WorkOptions} options @param {number} limit in ms */
async function connectTo(address, options, limit) {
  const colon = address.lastIndexOf(':')
  const host = address.slice(0, colon).replace(/^\[|\]$/g, '')
  const port = Number(address.slice(colon + 1))
  if (colon < 1 || !Number.isInteger(port)) throw new ReplicadError('usage', `${address} is no HOST:PORT`)
  const socket = options.tls ? tls.connect({ host, port, servername: host, ...options.tls }) : net.connect({ host, port })
  socket.setNoDelay(true)
  const connection = new Connection(socket, address)
  const abort = () => connection.close(new ConnectionLost('aborted'))
  options.signal?.addEventListener('abort', abort)
  socket.on('close', () => options.signal?.removeEventListener('abort', abort))
  if (options.signal?.aborted) abort()
  const timer = setTimeout(() => connection.close(new ConnectionLost(`${address} did not answer in time`)), limit)
  try {
    const first = await connection.line()
    if (first.startsWith('ERROR')) throw refusal(first.slice(6))
    if (!first.startsWith('SERVER ')) throw new ReplicadError('protocol', `${address} is no replicad`)
  } catch (error) {
    connection.close()
    throw error
  } finally {
    clearTimeout(timer)
  }
  connection.send(`NAME ${options.name ?? 'replicad.mjs'}`, ...(options.secret ? [`AUTH ${options.secret}`] : []))
  return connection
}

/** The first address that answers, in their order. @param {string} addresses @param {Options | WorkOptions} options */
async function connect(addresses, options) {
  const all = addresses.split(',').map((address) => address.trim())
  for (const [at, address] of all.entries()) {
    try {
      return await connectTo(address, options, all.length > 1 ? CONNECT_ONE_OF_SEVERAL : CONNECT)
    } catch (error) {
      if (options.signal?.aborted || !(error instanceof ConnectionLost) || at === all.length - 1) throw error
    }
  }
  throw new ReplicadError('usage', 'no address is given')
}

const PASSING = /^(database|row_|stream_refused|token_ahead|slow_reader|tube_refused|partitions_changed|too_many)/

/**
 * Wait before the next try, or throw the error if no other try helps. Returns the next pause.
 * @param {unknown} error @param {number} pause @param {Connection | null} connection @param {Options} options
 */
async function rest(error, pause, connection, options) {
  connection?.close()
  if (!(error instanceof ConnectionLost || (error instanceof ReplicadError && PASSING.test(error.code)))) throw error
  options.onDisconnect?.(error, pause)
  await sleep(pause, options.signal)
  return Math.min(2 * pause, MAX_PAUSE)
}

/** How far each writer has got: `min` for all, `ahead` by number. A token's text is `[epoch!]min[~number.at]...`. */
class Vector {
  /** @param {bigint} min @param {Map<number, bigint>} ahead @param {string | null} epoch */
  constructor(min, ahead = new Map(), epoch = null) {
    this.min = min
    this.ahead = new Map([...ahead].filter(([, at]) => at > min).sort((a, b) => a[0] - b[0]))
    this.epoch = epoch
  }

  /** @param {string} text */ static parse(text) {
    const found = /^(?:([0-9a-f]{8,32})!)?(-?\d{1,19})((?:~\d{1,9}\.-?\d{1,19})*)$/.exec(text)
    if (!found) throw new ReplicadError('bad_token', `${text} is no token`)
    const pairs = found[3].split('~').slice(1).map((pair) => pair.split('.'))
    return new Vector(BigInt(found[2]), new Map(pairs.map(([number, at]) => [Number(number), BigInt(at)])), found[1] ?? null)
  }

  /** @param {number} number */ at(number) { return this.ahead.get(number) ?? this.min }

  toString() {
    const ahead = [...this.ahead].map(([number, at]) => `~${number}.${at}`)
    return `${this.epoch ? `${this.epoch}!` : ''}${this.min}${ahead.join('')}`
  }
}

/** The position in one stream over many connections. */
class Progress {
  /** @param {string} stream @param {string} token */ constructor(stream, token) {
    this.stream = stream
    /** @type {boolean} */ this.answered = false
    /** @type {Vector | string} */ this.base = token === 'NOW' || token === 'EARLIEST' ? token : Vector.parse(token)
    this.epoch = this.base instanceof Vector ? this.base.epoch : null
    /** @type {Map<string, number>} */ this.numbers = new Map() // of the listed writers
    /** @type {Map<string, bigint>} */ this.marks = new Map() // positions that were received
    /** @type {Map<string, string[]>} */ this.batches = new Map()
    this.handed = this.base instanceof Vector ? this.base.min : UNKNOWN // rows of any writer may be out up to here
    this.accepted = false // a token of ours, at least once
    this.held = 0 // characters of open batches
    this.#open()
  }

  #open() {
    this.answered = this.setOpen = false // setOpen: whether the next WRITERS adds to the set
    this.held = 0
    this.batches.clear()
  }

  /** Where all positions are now: a Vector, NOW or EARLIEST. */
  vector() {
    const known = [...this.numbers].filter(([name]) => this.marks.has(name))
    const reported = new Map(known.map(([name, number]) => [number, /** @type {bigint} */ (this.marks.get(name))]))
    const base = this.base
    if (reported.size && reported.size === this.numbers.size) {
      return new Vector(least(reported.values()), reported, this.epoch)
    }
    if (!(base instanceof Vector)) return base
    const stand = new Map([...this.numbers.values()].map((number) => [number, reported.get(number) ?? base.at(number)]))
    return new Vector(least([base.min, ...stand.values()]), new Map([...base.ahead, ...stand]), this.epoch)
  }

  get token() { return String(this.vector()) }

  newConnection() {
    this.base = this.vector()
    const min = this.base instanceof Vector ? this.base.min : UNKNOWN
    for (const [name, at] of this.marks) if (!this.numbers.has(name) && at <= min) this.marks.delete(name)
    if (!(this.base instanceof Vector)) this.marks.clear()
    this.#open()
  }

  /** @param {bigint} position */
  othersAbove(position) { return [...this.marks].some(([name, at]) => at > position && !this.numbers.has(name)) }

  /** @param {string | null} instance @param {bigint | null} above @param {string} reason @returns {Reset} */
  reset(instance, above, reason) {
    return { type: 'reset', stream: this.stream, instance, above, token: this.token, reason }
  }

  /** Forget everything; the stream begins again. @param {string} reason */
  restart(reason) {
    this.base = 'EARLIEST'
    this.epoch = null
    this.handed = UNKNOWN
    this.numbers.clear()
    this.marks.clear()
    this.#open()
    return this.reset(null, null, reason)
  }

  /** Rows above `to` are void. @param {Vector} to @returns {Reset[]} */
  rewind(to) {
    const at = this.vector()
    this.epoch = to.epoch
    if (!(at instanceof Vector)) return []
    const names = new Map([...this.numbers].map(([name, number]) => [number, name]))
    const nameless = [...at.ahead].some(([number, position]) => !names.has(number) && position > to.at(number))
    if (max(this.handed, at.min) > to.min || this.othersAbove(to.min) || nameless) {
      for (const [name, position] of this.marks) if (position > to.min) this.marks.set(name, to.min)
      this.handed = to.min
      this.base = new Vector(to.min, new Map(), to.epoch)
      return [this.reset(null, to.min, 'forked')]
    }
    const back = [...at.ahead].filter(([number, position]) => position > to.at(number))
    for (const [number] of back) this.marks.set(/** @type {string} */ (names.get(number)), to.at(number))
    this.base = to
    return back.map(([number]) => this.reset(names.get(number) ?? null, to.at(number), 'forked'))
  }

  /** A line of WRITERS: what to discard, and whether to connect again. @param {string[]} words */
  writers(words) {
    const [, , epoch, ...pairs] = words
    /** @type {Reset[]} */ const resets = []
    let again = false
    const fork = this.epoch !== null && this.epoch !== epoch
    if (fork) {
      const at = this.vector()
      if (at instanceof Vector) {
        const others = this.othersAbove(at.min)
        resets.push(...this.rewind(new Vector(at.min, at.ahead, epoch)))
        again = resets.length > 0 && this.answered && (at.ahead.size > 0 || others)
      }
    }
    if (this.vector() instanceof Vector) this.base = this.vector()
    this.epoch = epoch
    if (this.base instanceof Vector) this.base = new Vector(this.base.min, this.base.ahead, epoch)
    else if (!pairs.length && this.base === 'NOW') this.base = 'EARLIEST' // no writer yet: NOW is the same
    const named = new Map(pairs.map((pair) => pair.split(/=(?=\d+$)/)).map(([name, number]) => [name, Number(number)]))
    const adds = this.setOpen && !fork && named.size > 0 && ![...named.keys()].some((name) => this.numbers.has(name))
    this.numbers = adds ? new Map([...this.numbers, ...named]) : named
    this.setOpen = true
    return { resets, again }
  }

  /** @param {string} instance @param {bigint} prev @param {bigint} next @returns {Reset[] | 'gap'} */
  position(instance, prev, next) {
    this.answered = this.accepted = true
    const mark = this.marks.get(instance)
    const at = this.vector()
    if (at instanceof Vector) this.handed = max(this.handed, at.min)
    this.batches.delete(instance)
    if (next < prev) {
      this.marks.set(instance, next)
      const alone = this.numbers.size === 1 && this.numbers.has(instance) && this.othersAbove(next)
      return [this.reset(alone ? null : instance, next, 'moved_back')]
    }
    if (mark !== undefined && this.numbers.has(instance) && prev > mark) return 'gap'
    if (mark === undefined || next > mark) this.marks.set(instance, next)
    return []
  }

  /** @param {string} instance @param {string} token @param {string} row @returns {Rows | null} */
  row(instance, token, row) {
    if (!this.answered) return null
    if (token === 'batch') {
      const open = this.batches.get(instance) ?? []
      this.held += row.length
      if (open.push(row) > MAX_BATCH_ROWS || this.held > MAX_BATCH) throw new ReplicadError('protocol', `a batch of ${instance} does not end`)
      this.batches.set(instance, open)
      return null
    }
    const rows = [...(this.batches.get(instance) ?? []), row]
    this.batches.delete(instance)
    if (!this.batches.size) this.held = 0
    const at = BigInt(token)
    if (at <= (this.marks.get(instance) ?? UNKNOWN)) return null // it came before
    if (this.marks.size >= MAX_UNLISTED + this.numbers.size) {
      for (const position of this.marks.values()) this.handed = max(this.handed, position)
      for (const name of this.marks.keys()) if (!this.numbers.has(name)) this.marks.delete(name)
    }
    this.marks.set(instance, at)
    return { type: 'rows', stream: this.stream, instance, at, token: this.token, rows }
  }
}

const max = (/** @type {bigint} */ a, /** @type {bigint} */ b) => (a > b ? a : b)
const least = (/** @type {Iterable<bigint>} */ values) => [...values].reduce((a, b) => (a < b ? a : b))

/**
 * Rows of a stream from a token on, over any number of connections; ends when `options.signal` is aborted.
 * Throws a ReplicadError that another try does not help against, such as `unknown_stream` and `not_authorised`.
 * @param {string} addresses  HOST:PORT, or several with commas
 * @param {string} stream
 * @param {Options} [options]
 * @returns {AsyncGenerator<Rows | Reset, void>}
 */
export async function* follow(addresses, stream, options = {}) {
  const progress = new Progress(stream, options.token ?? 'NOW')
  let pause = FIRST_PAUSE
  let refusals = 0
  while (!options.signal?.aborted) {
    /** @type {Connection | null} */ let connection = null
    try {
      progress.newConnection()
      connection = await connect(addresses, options)
      connection.send(`REPLICATE ${stream} ${progress.token}`)
      for (;;) {
        const line = await connection.line()
        const words = line.split(' ')
        if (words[0] === 'ERROR') {
          const error = refusal(line.slice(6))
          const resets = refused(progress, error, ++refusals)
          if (resets === null) continue // a notice
          yield* resets
          progress.newConnection()
          connection.send(`REPLICATE ${stream} ${progress.token}`)
        } else if (words[1] !== stream) continue
        else if (words[0] === 'RDATA') {
          const found = progress.row(words[2], words[3], line.slice(words.slice(0, 4).join(' ').length + 1))
          if (found) yield found
        } else if (words[0] === 'POSITION') {
          const found = progress.position(words[2], BigInt(words[3]), BigInt(words[4]))
          if (found === 'gap') throw new ConnectionLost(`rows of ${stream} are missing before ${words[3]}`)
          yield* found
          refusals = 0
          pause = FIRST_PAUSE
        } else if (words[0] === 'WRITERS') {
          const { resets, again } = progress.writers(words)
          yield* resets
          if (again) throw new ConnectionLost(`history of ${stream} forked`)
        }
      }
    } catch (error) {
      if (options.signal?.aborted) return
      if (error instanceof ReplicadError && error.code === 'stream_refused' && !progress.accepted) throw error
      pause = await rest(error, pause, connection, options)
    } finally {
      connection?.close()
    }
  }
}

/**
 * What an ERROR means for the subscription: resets, then REPLICATE again; null: nothing. Throws what ends the connection.
 * @param {Progress} progress @param {Error} error @param {number} refusals
 * @returns {Reset[] | null}
 */
function refused(progress, error, refusals) {
  if (!(error instanceof ReplicadError)) throw error
  if (error.code === 'stream_waits') return null
  const ours = progress.accepted || (progress.base instanceof Vector && progress.base.epoch !== null)
  const named = / resume from (\S+)$/.exec(error.sentence)
  if (error.code === 'bad_token' && named && refusals < TOKEN_REFUSALS) return progress.rewind(Vector.parse(named[1]))
  if (error.code === 'token_expired' || (error.code === 'bad_token' && ours)) return [progress.restart(error.code)]
  if (error.code === 'token_ahead' && refusals >= TOKEN_REFUSALS) return [progress.restart(error.code)]
  throw error
}

/** Requests on one connection: answers come in the order of the requests. */
class Requests {
  /** @param {Connection} connection */ constructor(connection) {
    this.connection = connection
    /** @type {{ends: string, lines: string[], resolve: (lines: string[]) => void, reject: (error: unknown) => void}[]} */
    this.waiting = []
    this.#read()
  }

  async #read() {
    try {
      for (;;) {
        const line = await this.connection.line()
        const word = line.split(' ', 1)[0]
        const first = this.waiting[0]
        if (word === 'ERROR') {
          const error = refusal(line.slice(6))
          if (!(error instanceof ReplicadError) || !first) throw error
          this.waiting.shift()?.reject(error)
        } else if (first && (word === first.ends || word === 'RDATA')) {
          first.lines.push(line)
          if (word === first.ends) this.waiting.shift()?.resolve(first.lines)
        }
      }
    } catch (error) {
      this.connection.close(/** @type {Error} */ (error))
      for (const { reject } of this.waiting.splice(0)) reject(error)
    }
  }

  /** @param {string} line @param {string} ends the command that ends the answer @returns {Promise<string[]>} */
  ask(line, ends) {
    if (this.connection.error) return Promise.reject(this.connection.error)
    return new Promise((resolve, reject) => {
      this.waiting.push({ ends, lines: [], resolve, reject })
      this.connection.send(line)
    })
  }
}

/**
 * Process the pods of a tube under a lease, and acknowledge each when `handle` has returned; ends when `options.signal`
 * is aborted. A pod may come again, so `handle` must be idempotent. If it throws `tries` times, the pod is parked.
 * @param {string} addresses
 * @param {string} tube
 * @param {(ids: (number | string)[], pod: Pod, signal: AbortSignal) => Promise<void>} handle  its signal: the lease is lost
 * @param {WorkOptions} [options]
 */
export async function work(addresses, tube, handle, options = {}) {
  let pause = FIRST_PAUSE
  while (!options.signal?.aborted) {
    /** @type {Connection | null} */ let connection = null
    try {
      connection = await connect(addresses, options)
      const requests = new Requests(connection)
      while (!options.signal?.aborted) await workLease(requests, tube, handle, options, () => { pause = FIRST_PAUSE })
    } catch (error) {
      if (options.signal?.aborted) return
      pause = await rest(error, pause, connection, options)
    } finally {
      connection?.close()
    }
  }
}

/**
 * Claim the partition and work it until the lease is lost.
 * @param {Requests} requests @param {string} tube @param {Parameters<typeof work>[2]} handle @param {WorkOptions} options
 * @param {() => void} claimed
 */
async function workLease(requests, tube, handle, options, claimed) {
  const part = `${tube} ${options.partition ?? '0/1'}`
  const ttl = options.ttl ?? 30
  /** @type {string[]} */ let answer
  try {
    answer = await requests.ask(`CLAIM ${part} ttl=${ttl} wait=20`, 'LEASE')
  } catch (error) {
    if (error instanceof ReplicadError && error.code === 'lease_held') return // another worker has it; ask again
    throw error
  }
  claimed()
  const held = `${part} ${answer[0].split(' ')[3]}`
  const lost = new AbortController()
  const renew = () => requests.ask(`RENEW ${held}`, 'LEASE').catch((error) => lost.abort(error))
  const renewing = setInterval(renew, (ttl * 1000) / 3)
  try {
    let cursor = '0.0'
    while (!options.signal?.aborted) {
      const lines = await requests.ask(`PODS ${held} after=${cursor} limit=${options.limit ?? 100} wait=15`, 'CURSOR')
      cursor = lines[lines.length - 1].split(' ')[3]
      for (const line of lines.slice(0, -1)) {
        const pod = /** @type {Pod} */ (JSON.parse(line.slice(line.split(' ', 4).join(' ').length + 1)))
        const failed = await processPod(pod, handle, options, lost.signal)
        if (failed === null) await requests.ask(`ACK ${held} ${pod.seq}`, 'ACKED')
        else await requests.ask(`PARK ${held} ${pod.seq} * ${options.tries ?? 5} ${failed}`, 'PARKED')
      }
    }
    await requests.ask(`RELEASE ${held}`, 'RELEASE')
  } catch (error) {
    if (!(error instanceof ReplicadError) || error.code !== 'lease_lost') throw error
  } finally {
    clearInterval(renewing)
    lost.abort()
  }
}

/**
 * Null, or the text of the error of the last try.
 * @param {Pod} pod @param {Parameters<typeof work>[2]} handle @param {WorkOptions} options @param {AbortSignal} lost
 */
async function processPod(pod, handle, options, lost) {
  for (let tried = 1, pause = FIRST_PAUSE; ; tried++, pause = Math.min(2 * pause, MAX_PAUSE)) {
    if (lost.aborted) throw lost.reason
    try {
      await handle(pod.ids, pod, lost)
      return null
    } catch (error) {
      // A PARK is a line: no control characters, and not too long.
      if (tried >= (options.tries ?? 5)) return `${error}`.replace(/[\x00-\x1f\x7f-\x9f]+/g, ' ').slice(0, 1000)
      await sleep(pause, lost)
    }
  }
}

/** As a program. @param {string[]} words */ async function main([what, server, name, more]) {
  const secret = process.env.REPLICAD_TOKEN
  const options = { secret, onDisconnect: (/** @type {Error} */ error) => console.error(`replicad.mjs: ${error.message}`) }
  if (what === 'follow' && name) {
    for await (const event of follow(server, name, { ...options, token: more })) {
      if (event.type === 'reset') {
        const head = JSON.stringify({ stream: name, instance: event.instance, reset: event.reason }).slice(0, -1)
        process.stdout.write(`${head},"token":${event.above}}\n`)
      } else {
        const head = JSON.stringify({ stream: name, instance: event.instance }).slice(0, -1)
        for (const row of event.rows) process.stdout.write(`${head},"token":${event.at},"row":${row}}\n`)
      }
    }
  } else if (what === 'work' && name) {
    await work(server, name, async (ids) => console.log(JSON.stringify({ tube: name, ids })), { ...options, partition: more })
  } else {
    console.error('usage: node replicad.mjs follow HOST:PORT STREAM [TOKEN] | work HOST:PORT TUBE [PARTITION/PARTITIONS]')
    process.exitCode = 2
  }
}

if (process.argv[1] && import.meta.url === pathToFileURL(process.argv[1]).href) {
  main(process.argv.slice(2)).catch((error) => {
    console.error(`replicad.mjs: ${error.message}`)
    process.exitCode = 1
  })
}
