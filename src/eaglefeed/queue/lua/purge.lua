-- purge: deletes the queue, without blocking the server for a large one. The last token stays, so that none is given
-- out twice and a worker of before settles nothing.
--
-- KEYS
--   ref         HASH  id -> payload, of all that is not done
--   digest      HASH  id -> digest of its payload, of all that was ever put
--   seq         ZSET  id by place in put order, of all that is unsettled
--   ready       LIST  ids, the head is leased next
--   delayed     ZSET  id by the time it is due, ms
--   leases      ZSET  token by deadline, ms
--   lease       HASH  token -> consumer and ids, a line each
--   open        HASH  token -> number of its items that are not settled
--   owner       HASH  id -> token of the lease that holds it
--   bytes       HASH  id -> stored bytes, where not 0
--   deliveries  HASH  id -> times leased
--   crashes     HASH  id -> lone crashes
--   errors      HASH  id -> reason of its last nack
--   dead        HASH  id -> reason
--   ctl         HASH  token, seq, redelivered, stored, full, closed and the limits
--   wake        LIST  at most 4 tokens that waiting leases pop
-- Reply  how many items were not done
local held = call('HLEN', q.ref)
local token = call('HGET', q.ctl, 'token')
call('UNLINK', unpack(KEYS))
if token then call('HSET', q.ctl, 'token', token) end
return held
