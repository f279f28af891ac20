-- nack: gives items back: to the head as if never leased, to the delayed ones, or to the dead letters.
--
-- KEYS
--   leases      ZSET  token by deadline, ms
--   ready       LIST  ids, the head is leased next
--   delayed     ZSET  id by the time it is due, ms
--   dead        HASH  id -> reason
--   deliveries  HASH  id -> deliveries that ended unsettled
--   errors      HASH  id -> reason of its last nack
--   parked      SET   ids that are back, and whose tensors are gone
--   recalled    SET   ids whose tensors are gone
--   state       HASH  leases; leased: ids in them
--   wake        LIST  at most 4 tokens that waiting leases pop
--   ref         HASH  id -> payload, of all that is kept
--   seq         ZSET  id by place in put order, of all that is not released
--   bytes       HASH  id -> stored bytes, where not 0
--   pending     HASH  id -> groups that have neither done it nor hold it dead; only with several groups
--   released    LIST  ids whose shards may go, a line each, of one settlement
--   ctl         HASH  stored, full, released and the limits
--   room        LIST  at most 64 tokens that waiting producers pop
--   each.dead   HASH  id -> reason
--   run.replay  HASH  call -> sequence number and reply of this client's last one
-- ARGV   token, mode, amount, counted, reason, ids, a line each. The mode is head, dead, delay (amount: ms) or backoff
--        (amount: jitter, 0 to 1); counted is 0 for a delivery that does not count against the items
-- Reply  {ok, a 1 (given back) or 0 (stale) for each id}
local before = earlier(run)
if before then return before end
local token, mode, amount, counted, reason = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1', ARGV[5]
local state = call('HMGET', q.state, 'leased', token)
local flags, mine = leave(q, token, state[2], ARGV[6], state[1])
if #mine == 0 then return {'ok', flags} end

local function note_reason()
  local fields = {}
  for i, id in ipairs(mine) do
    fields[2 * i - 1], fields[2 * i] = id, reason
  end
  call('HSET', q.errors, unpack(fields))
end

-- How many deliveries of each have ended unsettled, with the one that just did.
local function count()
  if counted then return count_deliveries(q, mine) end
  local counts = call('HMGET', q.deliveries, unpack(mine))
  for i = 1, #mine do counts[i] = tonumber(counts[i] or 0) + 1 end
  return counts
end

-- The base doubled with each delivery, the upper half of it spread by the jitter; as in rules.backoff_ms.
local function backoff_ms(count, base, max)
  return math.floor(math.min(max, base * 2 ^ math.min(count - 1, 30)) * (0.5 + 0.5 * amount) * 1000)
end

local function delay(counts)
  local now, wait_ms, places = now_ms(), {}, {}
  local ctl = call('HMGET', q.ctl, 'backoff_base_s', 'backoff_max_s')
  local base, max = tonumber(ctl[1] or DEFAULTS.backoff_base_s), tonumber(ctl[2] or DEFAULTS.backoff_max_s)
  for i, id in ipairs(mine) do
    wait_ms[id] = mode == 'delay' and amount or backoff_ms(counts[i], base, max)
  end
  for i, id in ipairs(with_tensors(q, mine)) do
    places[2 * i - 1], places[2 * i] = text(now + wait_ms[id]), id
  end
  if #places > 0 then call('ZADD', q.delayed, unpack(places)) end
end

if mode == 'head' then
  push_head(q, mine)
  return keep(run, {'ok', flags})
end
note_reason()
local counts = count()
if mode == 'dead' then
  local reasons = {}
  for i = 1, #mine do reasons[i] = reason end
  bury(q, groups, mine, reasons)
else
  delay(counts)
end
return keep(run, {'ok', flags})
