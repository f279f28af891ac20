-- requeue: puts dead letters at the tail, with a clean count.
--
-- KEYS
--   dead        HASH  id -> reason
--   deliveries  HASH  id -> times leased
--   crashes     HASH  id -> lone crashes
--   errors      HASH  id -> reason of its last nack
--   seq         ZSET  id by place in put order, of all that is unsettled
--   ready       LIST  ids, the head is leased next
--   bytes       HASH  id -> stored bytes, where not 0
--   ctl         HASH  seq, stored, full and the limits
--   wake        LIST  at most 4 tokens that waiting leases pop
-- ARGV   ids
-- Reply  how many were dead letters
local ids, seen = {}, {}
for i, reason in ipairs(call('HMGET', q.dead, unpack(ARGV))) do
  local id = ARGV[i]
  if reason and not seen[id] then
    seen[id] = true
    ids[#ids + 1] = id
  end
end
if #ids == 0 then return 0 end
for _, key in ipairs({q.dead, q.deliveries, q.crashes, q.errors}) do call('HDEL', key, unpack(ids)) end
local last, places = call('HINCRBY', q.ctl, 'seq', #ids), {}
for i, id in ipairs(ids) do
  places[2 * i - 1], places[2 * i] = text(last - #ids + i), id
end
call('ZADD', q.seq, unpack(places))
call('RPUSH', q.ready, unpack(ids))
count_stored(q, ids, 1)
update_room(q)
wake(q)
return #ids
