-- page: the next unsettled items in put order.
--
-- KEYS
--   seq         ZSET  id by place in put order, of all that is unsettled
--   ref         HASH  id -> payload, of all that is not done
--   deliveries  HASH  id -> times leased
-- ARGV   place of the last item that was read, how many
-- Reply  {last place, ids, payloads, delivery counts}; empty at the end
local found = call('ZRANGEBYSCORE', q.seq, '(' .. ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[2])
if #found == 0 then return {} end
local ids = {}
for i = 1, #found, 2 do ids[#ids + 1] = found[i] end
return {found[#found], ids, call('HMGET', q.ref, unpack(ids)), call('HMGET', q.deliveries, unpack(ids))}
