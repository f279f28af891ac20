-- lease: reclaims leases that ran out, promotes delayed items that are due, then leases up to n items of the head.
--
-- An item with a crash behind it is leased alone, and only crashes while alone are counted, so a poison item does not
-- take its lease-mates along. Both the reclaiming and the promoting take at most 1,000 a call; the caller calls again
-- while `next` is not in the future, so a backlog of any size drains.
--
-- KEYS
--   ready       LIST  ids, the head is leased next
--   delayed     ZSET  id by the time it is due, ms
--   leases      ZSET  token by deadline, ms
--   tentative   ZSET  ids of one ack, a line each, by the step that learned them
--   deliveries  HASH  id -> deliveries that ended unsettled
--   crashes     HASH  id -> times its lease ran out while it was leased alone; there from any crash on
--   errors      HASH  id -> reason of its last nack
--   dead        HASH  id -> reason
--   parked      SET   ids that are back, and whose tensors are gone
--   recalled    SET   ids whose tensors are gone
--   state       HASH  token, session, restoring, redelivered, leases; leased: ids in them
--   wake        LIST  at most 4 tokens that waiting leases pop
--   ref         HASH  id -> payload, of all that is kept
--   seq         ZSET  id by place in put order, of all that is not released
--   bytes       HASH  id -> stored bytes, where not 0
--   pending     HASH  id -> groups that have neither done it nor hold it dead; only with several groups
--   released    LIST  ids whose shards may go, a line each, of one settlement
--   ctl         HASH  stored, full, released, closed and the limits
--   room        LIST  at most 64 tokens that waiting producers pop
--   each.dead   HASH  id -> reason
--   run.replay  HASH  call -> sequence number and reply of this client's last one
-- ARGV   n, visibility timeout ms, consumer, session, the newest token that this client was given or 0, 1 if it knows
--        that groups are declared
-- Reply  {lease, token, deadline, ids, a line each, payloads, deliveries that ended before, or none}
--        | {empty | commit_due | drained, next ms or 0, now ms} | {session, the newest one}
--        | {lost, 1 if the queue is there, but as it was before}: the server does not know what it said
local MAX_LEASES, MAX_ITEMS, RESTORE_POLL_MS = 64, 1000, 50

local noted = call('EXISTS', q.deliveries) == 1 -- whether any delivery ended unsettled, as by a crash

local function reply_of(token, deadline, ids, joined)
  local ended = noted and call('HMGET', q.deliveries, unpack(ids)) or {}
  return {'lease', token, deadline, joined, call('HMGET', q.ref, unpack(ids)), ended}
end

-- The lease of this very call, as long as it holds all it was given.
local before = earlier(run)
local lease = before and call('HGET', q.state, before[1])
if lease then
  local lines = lines_of(lease)
  local given = tonumber(string.match(table.remove(lines, 1), '%d+'))
  if #lines == given then return reply_of(before[1], before[2], lines, table.concat(lines, '\n')) end
end

local now = now_ms()
local state = call('HMGET', q.state, 'token', 'session', 'restoring', 'leased')
local leased = tonumber(state[4] or 0)
if tonumber(state[1] or 0) < tonumber(ARGV[5]) then
  return {'lost', call('HGET', q.ctl, 'groups') and 1 or 0}
end
if ARGV[4] ~= (state[2] or '0') then return {'session', state[2] or '0'} end
if state[3] then return {'empty', text(now + RESTORE_POLL_MS), text(now)} end

local function reclaim()
  local due = call('ZRANGEBYSCORE', q.leases, '-inf', text(now), 'LIMIT', 0, MAX_LEASES)
  if #due == 0 then return end
  local ids, alone = end_leases(q, due, MAX_ITEMS)
  leased = leased - #ids
  call('HSET', q.state, 'leased', leased)
  note_crashes(q, ids, alone)
  noted = true
  push_head(q, bury_crashed(q, groups, ids))
end

local function promote()
  local due = call('ZRANGEBYSCORE', q.delayed, '-inf', text(now), 'LIMIT', 0, MAX_ITEMS)
  if #due == 0 then return end
  call('ZREM', q.delayed, unpack(due))
  call('RPUSH', q.ready, unpack(due))
end

-- Takes up to n ids off the head; one with a crash behind it goes alone.
local function take(n)
  local ids = call('LPOP', q.ready, n)
  if not ids or not noted then return ids or {} end
  local crashes, size = call('HMGET', q.crashes, unpack(ids)), 1
  while size < #ids and not crashes[1] and not crashes[size + 1] do size = size + 1 end
  local rest = {}
  for i = #ids, size + 1, -1 do rest[#rest + 1] = table.remove(ids) end
  if #rest > 0 then call('LPUSH', q.ready, unpack(rest)) end
  return ids
end

local function nothing()
  local ctl, soonest, told = read_ctl(q), 0, 'empty'
  if ARGV[6] == '1' and not ctl.groups then return {'lost', 0} end
  for _, key in ipairs({q.delayed, q.leases}) do
    local at = tonumber(call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
    if at and (soonest == 0 or at < soonest) then soonest = at end
  end
  if ctl.closed and call('LLEN', q.ready) + call('ZCARD', q.delayed) + leased == 0 then
    return {'drained', '0', text(now)}
  end
  if ctl.full and call('ZCARD', q.tentative) > 0 then
    told = 'commit_due'
  elseif ctl.full and call('ZCARD', q.seq) < ctl.high_count and ctl.stored < ctl.high_bytes then
    set_full(q, false) -- consumers starve: they come before the hysteresis
  end
  return {told, text(soonest), text(now)}
end

reclaim()
promote()
local ids = take(tonumber(ARGV[1]))
if #ids == 0 then return nothing() end

local token, deadline = above(state[1], now), text(now + tonumber(ARGV[2]))
local joined = table.concat(ids, '\n')
local record = #ids .. ' ' .. ARGV[3] .. '\n' .. joined
call('HSET', q.state, 'token', token, 'leased', leased + #ids, token, record)
call('ZADD', q.leases, deadline, token)
local reply, again = reply_of(token, deadline, ids, joined), 0
for i in ipairs(noted and ids or {}) do
  if reply[6][i] then again = again + 1 end
end
if again > 0 then call('HINCRBY', q.state, 'redelivered', again) end
if call('LLEN', q.ready) > 0 then wake(q) end
keep(run, {token, deadline})
return reply
