-- point: keeps a point; of too many every second one goes, and from then on points are made half as often.
--
-- KEYS
--   run.journal_series  ZSET  time, ms, and on the next line the point's values, by that time
--   run.journal_pace    HASH  bucket_ms: length of a stretch of time that has one point
-- ARGV   time, ms, values, most points, length of a stretch at first, ms
local MOST_AT_ONCE = 1000
local at, most = ARGV[1], tonumber(ARGV[3])
call('ZREMRANGEBYSCORE', run.journal_series, at, at) -- of this very call, if it is a repeated one
call('ZADD', run.journal_series, at, at .. '\n' .. ARGV[2])
if call('ZCARD', run.journal_series) <= most then return 0 end
local all, gone = call('ZRANGE', run.journal_series, 0, most), {}
for i = 2, #all, 2 do gone[#gone + 1] = all[i] end
for from = 1, #gone, MOST_AT_ONCE do
  call('ZREM', run.journal_series, unpack(gone, from, math.min(from + MOST_AT_ONCE - 1, #gone)))
end
local bucket = tonumber(call('HGET', run.journal_pace, 'bucket_ms') or ARGV[4])
call('HSET', run.journal_pace, 'bucket_ms', text(2 * bucket))
return #gone
