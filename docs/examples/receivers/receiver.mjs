// A receiver of webhooks of `replicad sender --sign standard`, for Node 20 and newer, without packages. With a package:
// npm install standardwebhooks, and `new Webhook(secret).verify(body, headers)` in place of `signed`.
//
//     WEBHOOK_SECRET=whsec_... node receiver.mjs 8080

import { createHmac, timingSafeEqual } from 'node:crypto'
import { createServer } from 'node:http'

const MOST = 8 << 20 // bytes of a request; the sender's --transaction-bytes is 4 MiB
const REMEMBERED = 10_000 // ids of requests that were accepted
const MAX_AGE = 300 // seconds
const key = Buffer.from((process.env.WEBHOOK_SECRET ?? '').replace(/^whsec_/, ''), 'base64')
const seen = new Set() // a real receiver keeps the ids where it keeps the effect of the events
if (key.length < 24) throw new Error('WEBHOOK_SECRET is what `replicad sender secret --sign standard NAME` prints')

/** Whether a request was signed with the secret, at most five minutes ago. */
function signed(headers, body) {
  const id = headers['webhook-id'], sent = headers['webhook-timestamp'], given = headers['webhook-signature'] ?? ''
  if (!id || !/^\d{1,12}$/.test(sent) || Math.abs(Date.now() / 1000 - Number(sent)) > MAX_AGE) return false
  const made = createHmac('sha256', key).update(`${id}.${sent}.`).update(body).digest()
  return given.split(' ').some((one) => {
    const found = Buffer.from(one.startsWith('v1,') ? one.slice(3) : '', 'base64')
    return found.length === made.length && timingSafeEqual(found, made)
  })
}

/** The facts and updates of `--form webhook`, or the data of CloudEvents. */
function events(body) {
  if (Array.isArray(body)) return body.map((event) => event.data)
  return body.specversion ? [body.data] : [...body.facts, ...body.updates]
}

createServer(async (request, response) => {
  const pieces = []
  let size = 0
  for await (const piece of request) {
    size += piece.length
    if (size > MOST) return response.writeHead(413).end()
    pieces.push(piece)
  }
  const body = Buffer.concat(pieces)
  if (request.method !== 'POST' || !signed(request.headers, body)) return response.writeHead(401).end()
  const id = request.headers['webhook-id']
  if (!seen.has(id)) { // a repeated request has the same id
    for (const event of events(JSON.parse(body))) console.log(JSON.stringify(event))
    seen.add(id)
    if (seen.size > REMEMBERED) seen.delete(seen.values().next().value)
  }
  response.writeHead(204).end()
}).listen(Number(process.argv[2]), '127.0.0.1')
