-- post: keeps what a worker tells of itself; the longest silent ones of too many are forgotten, and counted.
--
-- KEYS
--   run.journal_workers  HASH  "role name" -> when it was posted, ms, and on the next line its values
--   run.journal_seen     ZSET  "role name" by when it was posted, ms
--   run.journal_totals   HASH  name -> count
-- ARGV   "role name", values, most workers
local at = text(now_ms())
call('HSET', run.journal_workers, ARGV[1], at .. '\n' .. ARGV[2])
call('ZADD', run.journal_seen, at, ARGV[1])
local over = math.min(call('ZCARD', run.journal_seen) - tonumber(ARGV[3]), 1000)
if over <= 0 then return 0 end
local gone = call('ZRANGE', run.journal_seen, 0, over - 1)
call('ZREM', run.journal_seen, unpack(gone))
call('HDEL', run.journal_workers, unpack(gone))
call('HINCRBY', run.journal_totals, 'forgotten_workers', #gone)
return #gone
