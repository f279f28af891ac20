-- close: the queue takes no new ids from now on; waiting leases look again.
--
-- KEYS
--   ctl         HASH  closed
--   each.wake   LIST  at most 4 tokens that waiting leases pop
--   run.replay  HASH  call -> sequence number and reply of this client's last one
-- Reply  {ok}
local before = earlier(run)
if before then return before end -- a requeue may have opened it again since
for _, group in ipairs(groups) do call('UNLINK', group.wake) end
call('HSET', q.ctl, 'closed', '1')
for _, group in ipairs(groups) do call('RPUSH', group.wake, '1', '1', '1', '1') end
return keep(run, {'ok'})
