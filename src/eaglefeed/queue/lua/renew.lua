-- renew: moves a lease's deadline. It can come late: until somebody reclaims it, the lease is its holder's.
--
-- KEYS
--   leases      ZSET  token by deadline, ms
-- ARGV   token, visibility timeout ms
-- Reply  the new deadline in ms, or 0 if the lease is gone
if call('ZREM', q.leases, ARGV[1]) == 0 then return 0 end
local deadline = now_ms() + tonumber(ARGV[2])
call('ZADD', q.leases, text(deadline), ARGV[1])
return deadline
