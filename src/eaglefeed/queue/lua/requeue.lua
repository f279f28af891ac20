-- requeue: puts dead letters at the tail, with a clean count; requeued prompts reopen their samples.
--
-- KEYS
--   dead        HASH  id -> reason
--   deliveries  HASH  id -> deliveries that ended unsettled
--   crashes     HASH  id -> lone crashes
--   errors      HASH  id -> reason of its last nack
--   ready       LIST  ids, the head is leased next
--   parked      SET   ids that are back, and whose tensors are gone
--   recalled    SET   ids whose tensors are gone
--   wake        LIST  at most 4 tokens that waiting leases pop
--   seq         ZSET  id by place in put order, of all that is not released
--   bytes       HASH  id -> stored bytes, where not 0
--   pending     HASH  id -> groups that have neither done it nor hold it dead; only with several groups
--   ctl         HASH  stored, full, groups and the limits
--   room        LIST  at most 64 tokens that waiting producers pop
--   each.dead   HASH  id -> reason
--   samples.ctl HASH  closed; of the queue that gets these prompts' samples
--   run.replay  HASH  call -> sequence number and reply of this client's last one
-- ARGV   1 if these are prompts else 0, ids
-- Reply  {ok, how many were dead letters}
local before = earlier(run)
if before then return before end
local reopens, ids, seen = table.remove(ARGV, 1) == '1', {}, {}
for i, reason in ipairs(call('HMGET', q.dead, unpack(ARGV))) do
  local id = ARGV[i]
  if reason and not seen[id] then
    seen[id] = true
    ids[#ids + 1] = id
  end
end
if #ids == 0 then return {'ok', 0} end
for _, key in ipairs({q.dead, q.deliveries, q.crashes, q.errors}) do call('HDEL', key, unpack(ids)) end

-- What some group still has to do has its place; the rest takes room again.
local pending, homeless = {}, {}
for i, at in ipairs(call('ZMSCORE', q.seq, unpack(ids))) do
  if not at then homeless[#homeless + 1] = ids[i] end
end
if #groups > 1 then
  for i, others in ipairs(call('HMGET', q.pending, unpack(ids))) do
    pending[2 * i - 1], pending[2 * i] = ids[i], tonumber(others or 0) + 1
  end
  call('HSET', q.pending, unpack(pending))
end
if #homeless > 0 then
  place(q, homeless)
  count_stored(q, homeless)
end
local back = with_tensors(q, ids)
if #back > 0 then call('RPUSH', q.ready, unpack(back)) end
if reopens then call('HDEL', samples.ctl, 'closed') end
update_room(q, read_ctl(q), call('ZCARD', q.seq))
wake(q)
return keep(run, {'ok', #ids})
