-- beat: a worker's sign of life; forgets workers that have long been silent.
--
-- KEYS
--   run.workers  ZSET  "role name" by last sign of life, ms; shared by the run's queues
-- ARGV   "role name", ms of silence after which a worker is forgotten
local now = now_ms()
call('ZREMRANGEBYSCORE', run.workers, '-inf', '(' .. text(now - tonumber(ARGV[2])))
call('ZADD', run.workers, text(now), ARGV[1])
return 1
