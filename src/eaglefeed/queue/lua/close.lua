-- close: the queue takes no new ids from now on; waiting leases look again.
--
-- KEYS
--   ctl         HASH  closed
--   wake        LIST  at most 4 tokens that waiting leases pop
call('UNLINK', q.wake)
call('HSET', q.ctl, 'closed', '1')
call('RPUSH', q.wake, '1', '1', '1', '1')
return 1
