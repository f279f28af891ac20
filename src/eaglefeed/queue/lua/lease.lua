-- lease: reclaims what ran out, promotes what is due, and leases up to n items of the head.
--
-- Reclaims at most 64 leases or 1,000 items and promotes at most 1,000 a call; the caller calls again while `next` is
-- not in the future, so a backlog of any size drains.
--
-- KEYS
--   ready       LIST  ids, the head is leased next
--   delayed     ZSET  id by the time it is due, ms
--   leases      ZSET  token by deadline, ms
--   lease       HASH  token -> consumer and ids, a line each
--   open        HASH  token -> number of its items that are not settled
--   owner       HASH  id -> token of the lease that holds it
--   ref         HASH  id -> payload, of all that is not done
--   seq         ZSET  id by place in put order, of all that is unsettled
--   bytes       HASH  id -> stored bytes, where not 0
--   deliveries  HASH  id -> times leased
--   crashes     HASH  id -> times its lease ran out while it was leased alone; there from any crash on
--   errors      HASH  id -> reason of its last nack
--   dead        HASH  id -> reason
--   ctl         HASH  token, redelivered, stored, full, closed and the limits
--   wake        LIST  at most 4 tokens that waiting leases pop
-- ARGV   n, visibility timeout ms, consumer
-- Reply  {lease, token, deadline, ids, payloads, delivery counts} | {empty | drained, next ms or 0, now ms}
local MAX_LEASES, MAX_ITEMS = 64, 1000
local now = now_ms()

-- The leases that ran out, and who of their items they still hold: tokens, ids, ids leased alone.
local function expired()
  local tokens, ids, holders, alone = {}, {}, {}, {}
  local due = call('ZRANGEBYSCORE', q.leases, '-inf', text(now), 'LIMIT', 0, MAX_LEASES)
  if #due == 0 then return tokens end
  for i, lease in ipairs(call('HMGET', q.lease, unpack(due))) do
    local lines = {}
    for line in string.gmatch(lease, '[^\n]+') do lines[#lines + 1] = line end
    if i > 1 and #ids + #lines - 1 > MAX_ITEMS then break end
    tokens[i] = due[i]
    for k = 2, #lines do
      ids[#ids + 1], holders[#ids + 1] = lines[k], due[i]
      if #lines == 2 then alone[lines[k]] = due[i] end
    end
  end
  local held = {}
  for i, owner in ipairs(call('HMGET', q.owner, unpack(ids))) do
    if owner == holders[i] then held[#held + 1] = ids[i] end
  end
  return tokens, held, alone
end

local function bury_crashed(ids, counts)
  local reasons = {}
  for i, reason in ipairs(call('HMGET', q.errors, unpack(ids))) do
    local told = reason and '; last error: ' .. reason or ''
    reasons[i] = 'its lease ran out ' .. text(counts[i]) .. ' times while it was leased alone' .. told
  end
  bury(q, ids, reasons)
end

local function reclaim()
  local tokens, ids, alone = expired()
  if #tokens == 0 then return end
  for _, key in ipairs({q.lease, q.open}) do call('HDEL', key, unpack(tokens)) end
  call('ZREM', q.leases, unpack(tokens))
  local back, fields, dead, counts = {}, {}, {}, {}
  local max_deliveries = tonumber(call('HGET', q.ctl, 'max_deliveries') or DEFAULTS.max_deliveries)
  for i, before in ipairs(call('HMGET', q.crashes, unpack(ids))) do
    local id = ids[i]
    local count = tonumber(before or 0) + (alone[id] and 1 or 0)
    fields[2 * i - 1], fields[2 * i] = id, text(count)
    if count >= max_deliveries then
      dead[#dead + 1], counts[#counts + 1] = id, count
    else
      back[#back + 1] = id
    end
  end
  call('HDEL', q.owner, unpack(ids))
  call('HSET', q.crashes, unpack(fields))
  if #back > 0 then push_head(q, back) end
  if #dead > 0 then bury_crashed(dead, counts) end
end

local function promote()
  local due = call('ZRANGEBYSCORE', q.delayed, '-inf', text(now), 'LIMIT', 0, MAX_ITEMS)
  if #due == 0 then return end
  call('ZREM', q.delayed, unpack(due))
  call('RPUSH', q.ready, unpack(due))
end

-- Up to n ids of the head; one with a crash behind it goes alone.
local function head(n)
  local ids = call('LRANGE', q.ready, 0, n - 1)
  if #ids == 0 then return ids end
  local chosen = {}
  for i, crashes in ipairs(call('HMGET', q.crashes, unpack(ids))) do
    if crashes and i > 1 then break end
    chosen[i] = ids[i]
    if crashes then break end
  end
  return chosen
end

local function nothing()
  local closed, soonest = call('HGET', q.ctl, 'closed'), 0
  if closed == '1' and call('ZCARD', q.seq) == 0 then return {'drained', 0, now} end
  for _, key in ipairs({q.delayed, q.leases}) do
    local at = tonumber(call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
    if at and (soonest == 0 or at < soonest) then soonest = at end
  end
  return {'empty', soonest, now}
end

reclaim()
promote()
local ids = head(tonumber(ARGV[1]))
if #ids == 0 then return nothing() end
call('LPOP', q.ready, #ids)

local deadline = text(now + tonumber(ARGV[2]))
local token = text(math.max(tonumber(call('HGET', q.ctl, 'token') or 0) + 1, now * 1000))
local owners, counts, fields, again = {}, {}, {}, 0
for i, before in ipairs(call('HMGET', q.deliveries, unpack(ids))) do
  counts[i] = tonumber(before or 0) + 1
  if counts[i] > 1 then again = again + 1 end
  owners[2 * i - 1], owners[2 * i] = ids[i], token
  fields[2 * i - 1], fields[2 * i] = ids[i], text(counts[i])
end
call('HSET', q.ctl, 'token', token)
call('HSET', q.owner, unpack(owners))
call('HSET', q.deliveries, unpack(fields))
call('HSET', q.lease, token, ARGV[3] .. '\n' .. table.concat(ids, '\n'))
call('HSET', q.open, token, #ids)
call('ZADD', q.leases, deadline, token)
if again > 0 then call('HINCRBY', q.ctl, 'redelivered', again) end
if call('LLEN', q.ready) > 0 then wake(q) end
return {'lease', token, deadline, ids, call('HMGET', q.ref, unpack(ids)), counts}
