-- recall: makes prompts whose producer died ready again and parks their samples, whose tensors died with it; the
-- samples are open again. At most 100 prompts a call, since a list gives up its ids one by one.
--
-- KEYS
--   run.workers      ZSET  "role name" by last sign of life, ms; shared by the run's queues
--   prompts.held     HASH  id -> producer that its sample's tensors stay with
--   prompts.ready    LIST  ids, the head is leased next
--   prompts.recalled SET   stays empty: prompts have no tensors
--   prompts.parked   SET   stays empty
--   prompts.wake     LIST  at most 4 tokens that waiting leases pop
--   samples.digest   HASH  id -> digest of its payload, of all that was ever put
--   samples.recalled SET   ids whose tensors are gone
--   samples.ctl      HASH  closed
--   each.ready       LIST  ids, the head is leased next
--   each.delayed     ZSET  id by the time it is due, ms
--   each.parked      SET   ids that are back, and whose tensors are gone
--   run.replay  HASH  call -> sequence number and reply of this client's last one
-- ARGV   ms of silence after which a producer is dead; prompt id, its producer; and so on
-- Reply  {ok, how many were recalled}
local before = earlier(run)
if before then return before end
local since, ids = now_ms() - tonumber(ARGV[1]), {}
for i = 2, #ARGV, 2 do
  local id, producer = ARGV[i], ARGV[i + 1]
  local seen = call('ZSCORE', run.workers, 'producer ' .. producer)
  local dead = not seen or tonumber(seen) < since
  if dead and call('HGET', prompts.held, id) == producer then ids[#ids + 1] = id end
end
if #ids == 0 then return {'ok', 0} end
call('HDEL', prompts.held, unpack(ids))
push_head(prompts, ids)
call('HDEL', samples.ctl, 'closed')
local gone = {}
for i, digest in ipairs(call('HMGET', samples.digest, unpack(ids))) do
  if digest then gone[#gone + 1] = ids[i] end
end
for _, id in ipairs(gone) do
  call('SADD', samples.recalled, id)
  for _, group in ipairs(groups) do
    if call('LREM', group.ready, 1, id) == 1 or call('ZREM', group.delayed, id) == 1 then
      call('SADD', group.parked, id)
    end
  end
end
return keep(run, {'ok', #ids})
