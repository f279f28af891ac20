-- stats: exact counts, and the workers that live.
--
-- KEYS
--   ready       LIST  ids, the head is leased next
--   delayed     ZSET  id by the time it is due, ms
--   owner       HASH  id -> token of the lease that holds it
--   digest      HASH  id -> digest of its payload, of all that was ever put
--   seq         ZSET  id by place in put order, of all that is unsettled
--   dead        HASH  id -> reason
--   ctl         HASH  redelivered, stored, closed, full
--   workers     ZSET  "role name" by last sign of life, ms; shared by the run's queues
-- ARGV   grace ms
-- Reply  {ready, delayed, leased, done, dead, ctl's four, workers}
local dead, ctl = call('HLEN', q.dead), call('HMGET', q.ctl, 'redelivered', 'stored', 'closed', 'full')
return {
  call('LLEN', q.ready),
  call('ZCARD', q.delayed),
  call('HLEN', q.owner),
  call('HLEN', q.digest) - call('ZCARD', q.seq) - dead,
  dead,
  ctl,
  call('ZRANGEBYSCORE', q.workers, text(now_ms() - tonumber(ARGV[1])), '+inf'),
}
