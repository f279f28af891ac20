-- claim: who asks first in a stretch of time makes the run's point for it.
--
-- KEYS
--   run.journal_pace  HASH  bucket_ms: length of a stretch; claimed: when the last point was claimed, ms
-- ARGV   length of a stretch at first, ms
-- Reply  the point's time, ms, or 0 where somebody has claimed this stretch
local now, pace = now_ms(), call('HMGET', run.journal_pace, 'bucket_ms', 'claimed')
local bucket = tonumber(pace[1] or ARGV[1])
if math.floor(now / bucket) <= math.floor(tonumber(pace[2] or 0) / bucket) then return '0' end
call('HSET', run.journal_pace, 'claimed', text(now))
return text(now)
