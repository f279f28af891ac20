-- purge: deletes the queue, without blocking the server for a large one. Groups, sessions and last tokens stay, so that
-- none is given out twice and a worker of before settles nothing.
--
-- KEYS
--   digest      HASH  id -> digest of its payload, of all that was ever put
--   ref         HASH  id -> payload, of all that is kept
--   seq         ZSET  id by place in put order, of all that is not released
--   bytes       HASH  id -> stored bytes, where not 0
--   pending     HASH  id -> groups that have neither done it nor hold it dead; only with several groups
--   released    LIST  ids whose shards may go, a line each, of one settlement
--   held        HASH  id -> producer that its sample's tensors stay with
--   recalled    SET   ids whose tensors are gone
--   ctl         HASH  stored, full, closed, groups and the limits
--   room        LIST  at most 64 tokens that waiting producers pop
--   each.ready       LIST  ids, the head is leased next
--   each.delayed     ZSET  id by the time it is due, ms
--   each.leases      ZSET  token by deadline, ms
--   each.tentative   ZSET  ids of one ack, a line each, by the step that learned them
--   each.returning   ZSET  id by place in put order, on its way to the head
--   each.parked      SET   ids that are back, and whose tensors are gone
--   each.deliveries  HASH  id -> deliveries that ended unsettled
--   each.crashes     HASH  id -> lone crashes
--   each.errors      HASH  id -> reason of its last nack
--   each.dead        HASH  id -> reason
--   each.state       HASH  token, session, restoring, committed, redelivered, leases, and counts
--   each.wake        LIST  at most 4 tokens that waiting leases pop
--   run.run     HASH  the run's record: instance, former:<instance>, and what the run agreed on
--   run.replay  HASH  call -> sequence number and reply of this client's last one
-- ARGV   1 if the record forgets its instance
-- Reply  {ok, how many items it kept that were not released}
local before = earlier(run)
if before then return before end
local ctl, lasting = call('HMGET', q.ctl, 'groups', 'released'), {}
local kept, names = call('HLEN', q.ref) - tonumber(ctl[2] or 0), ctl[1]
for i, group in ipairs(groups) do lasting[i] = call('HMGET', group.state, 'token', 'session') end
local instance = ARGV[1] == '1' and call('HGET', run.run, 'instance')
if instance then
  call('HDEL', run.run, 'instance')
  call('HSET', run.run, 'former:' .. instance, '1')
end
for _, keys in ipairs({q, unpack(groups)}) do
  for _, key in pairs(keys) do call('UNLINK', key) end
end
if names then call('HSET', q.ctl, 'groups', names) end
for i, group in ipairs(groups) do
  for k, field in ipairs({'token', 'session'}) do
    if lasting[i][k] then call('HSET', group.state, field, lasting[i][k]) end
  end
end
return keep(run, {'ok', kept})
