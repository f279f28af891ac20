-- stats: exact counts as one group sees them, and the workers that live.
--
-- KEYS
--   ready       LIST  ids, the head is leased next
--   delayed     ZSET  id by the time it is due, ms
--   returning   ZSET  id by place in put order, on its way to the head
--   seq         ZSET  id by place in put order, the time of its put in microseconds, of all that is not released
--   held        HASH  id -> producer that its sample's tensors stay with
--   parked      SET   ids that are back, and whose tensors are gone
--   digest      HASH  id -> digest of its payload, of all that was ever put
--   dead        HASH  id -> reason
--   state       HASH  session, committed, redelivered; leased and learned: ids in leases, and tentative ones
--   ctl         HASH  stored, closed, full, released
--   run.workers ZSET  "role name" by last sign of life, ms; shared by the run's queues
-- ARGV   grace ms
-- Reply  {ready, delayed, leased, tentative, held, parked, done, dead, state's three, ctl's four, workers, how long ago
--        the head was put, ms}. What a restore is about to give back counts as ready, and goes to the head.
local ready = call('LLEN', q.ready) + call('ZCARD', q.returning)
local state = call('HMGET', q.state, 'leased', 'learned')
local counts = {ready, call('ZCARD', q.delayed), tonumber(state[1] or 0), tonumber(state[2] or 0),
  call('HLEN', q.held), call('SCARD', q.parked)}
local dead, unsettled = call('HLEN', q.dead), 0
for _, count in ipairs(counts) do unsettled = unsettled + count end
counts[#counts + 1] = call('HLEN', q.digest) - unsettled - dead
counts[#counts + 1] = dead
counts[#counts + 1] = call('HMGET', q.state, 'redelivered', 'session', 'committed')
counts[#counts + 1] = call('HMGET', q.ctl, 'stored', 'closed', 'full', 'released')
local now = now_ms()
counts[#counts + 1] = call('ZRANGEBYSCORE', run.workers, text(now - tonumber(ARGV[1])), '+inf')
local head = call('ZRANGE', q.returning, 0, 0)[1] or call('LRANGE', q.ready, 0, 0)[1]
local put = head and call('ZSCORE', q.seq, head)
counts[#counts + 1] = text(put and math.max(now - math.floor(put / 1000), 0) or 0)
return counts
