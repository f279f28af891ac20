-- nack: gives items back: to the head as if never leased, to the delayed ones, or to the dead letters.
--
-- KEYS
--   owner       HASH  id -> token of the lease that holds it
--   open        HASH  token -> number of its items that are not settled
--   leases      ZSET  token by deadline, ms
--   lease       HASH  token -> consumer and ids, a line each
--   ready       LIST  ids, the head is leased next
--   delayed     ZSET  id by the time it is due, ms
--   dead        HASH  id -> reason
--   seq         ZSET  id by place in put order, of all that is unsettled
--   bytes       HASH  id -> stored bytes, where not 0
--   deliveries  HASH  id -> times leased
--   errors      HASH  id -> reason of its last nack
--   ctl         HASH  stored, full and the limits
--   wake        LIST  at most 4 tokens that waiting leases pop
-- ARGV   token, mode, amount, reason, ids. The mode is head, dead, delay (amount: ms) or backoff (amount: jitter, 0 to 1)
-- Reply  1 (given back) or 0 (stale) for each id
local token, mode, amount, reason = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local flags, mine = held_by(q, token, {unpack(ARGV, 5)})
if #mine == 0 then return flags end
release(q, token, mine)
local counts = call('HMGET', q.deliveries, unpack(mine))

local function give_back()
  local fields = {}
  for i, id in ipairs(mine) do
    fields[2 * i - 1], fields[2 * i] = id, text(tonumber(counts[i]) - 1)
  end
  call('HSET', q.deliveries, unpack(fields))
  push_head(q, mine)
end

local function note_reason()
  local fields = {}
  for i, id in ipairs(mine) do
    fields[2 * i - 1], fields[2 * i] = id, reason
  end
  call('HSET', q.errors, unpack(fields))
end

-- The base doubled with each delivery, the upper half of it spread by the jitter; as in rules.backoff_ms.
local function backoff_ms(count, base, max)
  return math.floor(math.min(max, base * 2 ^ math.min(count - 1, 30)) * (0.5 + 0.5 * amount) * 1000)
end

local function delay()
  local now, places = now_ms(), {}
  local ctl = call('HMGET', q.ctl, 'backoff_base_s', 'backoff_max_s')
  local base, max = tonumber(ctl[1] or DEFAULTS.backoff_base_s), tonumber(ctl[2] or DEFAULTS.backoff_max_s)
  for i, id in ipairs(mine) do
    local wait_ms = mode == 'delay' and amount or backoff_ms(tonumber(counts[i]), base, max)
    places[2 * i - 1], places[2 * i] = text(now + wait_ms), id
  end
  call('ZADD', q.delayed, unpack(places))
end

if mode == 'head' then
  give_back()
  return flags
end
note_reason()
if mode == 'dead' then
  local reasons = {}
  for i = 1, #mine do reasons[i] = reason end
  bury(q, mine, reasons)
else
  delay()
end
return flags
