-- ack: settles items as done. An id that the lease does not hold (any more) is stale and stays as it is.
--
-- KEYS
--   owner       HASH  id -> token of the lease that holds it
--   open        HASH  token -> number of its items that are not settled
--   leases      ZSET  token by deadline, ms
--   lease       HASH  token -> consumer and ids, a line each
--   ref         HASH  id -> payload, of all that is not done
--   seq         ZSET  id by place in put order, of all that is unsettled
--   bytes       HASH  id -> stored bytes, where not 0
--   deliveries  HASH  id -> times leased
--   crashes     HASH  id -> lone crashes
--   errors      HASH  id -> reason of its last nack
--   ctl         HASH  stored, full and the limits
-- ARGV   token, ids
-- Reply  1 (settled) or 0 (stale) for each id
local flags, mine = held_by(q, ARGV[1], {unpack(ARGV, 2)})
if #mine > 0 then
  release(q, ARGV[1], mine)
  settle(q, mine)
end
return flags
