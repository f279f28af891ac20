-- page: the next items that are not released, in put order.
--
-- KEYS
--   seq         ZSET  id by place in put order, of all that is not released
--   ref         HASH  id -> payload, of all that is kept
--   deliveries  HASH  id -> deliveries that ended unsettled
-- ARGV   place of the last item that was read, how many
-- Reply  {last place, ids, payloads, deliveries}; empty at the end
local found = call('ZRANGEBYSCORE', q.seq, '(' .. ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[2])
if #found == 0 then return {} end
local ids, counts = {}, {}
for i = 1, #found, 2 do ids[#ids + 1] = found[i] end
for i, ended in ipairs(call('HMGET', q.deliveries, unpack(ids))) do counts[i] = tonumber(ended or 0) end
return {found[#found], ids, call('HMGET', q.ref, unpack(ids)), counts}
