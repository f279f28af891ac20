-- restore: opens a new session and goes back to a step, in four stages, each in chunks of about 1,000 items; the caller
-- calls again until a stage is done, and nobody leases meanwhile. Whoever dies on the way leaves it to the next restore.
--
--   open    a new session; from here on no earlier step can be restored.
--   gather  what is tentative up to the step is settled; what is beyond it and what is leased goes to `returning`, by
--           place in put order. A lease that had run out counts as the crash that it is.
--   settle  ids that the checkpoint has seen, wherever this group has them. They are looked for one by one, the exception
--           to a constant number of calls: at most 100 a call.
--   finish  from `returning` to the head, the last place first.
--
-- KEYS
--   ready       LIST  ids, the head is leased next
--   delayed     ZSET  id by the time it is due, ms
--   leases      ZSET  token by deadline, ms
--   tentative   ZSET  ids of one ack, a line each, by the step that learned them
--   returning   ZSET  id by place in put order, on its way to the head
--   parked      SET   ids that are back, and whose tensors are gone
--   recalled    SET   ids whose tensors are gone
--   state       HASH  session, restoring, committed, leases; leased and learned: ids in leases, and tentative ones
--   dead        HASH  id -> reason
--   wake        LIST  at most 4 tokens that waiting leases pop
--   ref         HASH  id -> payload, of all that is kept
--   seq         ZSET  id by place in put order, of all that is not released
--   bytes       HASH  id -> stored bytes, where not 0
--   pending     HASH  id -> groups that have neither done it nor hold it dead; only with several groups
--   released    LIST  ids whose shards may go, a line each, of one settlement
--   deliveries  HASH  id -> deliveries that ended unsettled
--   crashes     HASH  id -> lone crashes
--   errors      HASH  id -> reason of its last nack
--   ctl         HASH  stored, full, released and the limits
--   room        LIST  at most 64 tokens that waiting producers pop
--   each.dead   HASH  id -> reason
--   prompts.held        HASH  id -> producer that its sample's tensors stay with
--   prompts.ref         HASH  id -> payload
--   prompts.seq         ZSET  id by place in put order
--   prompts.bytes       HASH  id -> stored bytes, where not 0
--   prompts.released    LIST  ids whose shards may go, a line each, of one settlement
--   prompts.dead        HASH  id -> reason
--   prompts.deliveries  HASH  id -> deliveries that ended unsettled
--   prompts.crashes     HASH  id -> lone crashes
--   prompts.errors      HASH  id -> reason of its last nack
--   prompts.ctl         HASH  stored, full, released and the limits
--   prompts.room        LIST  at most 64 tokens
--   run.replay  HASH  call -> sequence number and reply of this client's last one
-- ARGV   stage, session (0 to open one), step, ids to settle
-- Reply  {ok, session, 1 if the stage is to be called again} | {committed, that step} | {session, the newest one}
local before = earlier(run)
if before then return before end
local MAX_LEASES, MAX_ITEMS = 64, 1000
local stage, session, step = ARGV[1], ARGV[2], ARGV[3]
local state = call('HMGET', q.state, 'session', 'committed', 'leased', 'learned')

local function open()
  local committed = state[2] or '0'
  if tonumber(step) < tonumber(committed) then return {'committed', committed} end
  session = above(state[1], now_ms())
  call('HDEL', q.state, 'restoring')
  call('HSET', q.state, 'session', session, 'restoring', step, 'committed', step)
  return keep(run, {'ok', session, 0})
end

local function to_return(ids)
  local places = {}
  for i, at in ipairs(call('ZMSCORE', q.seq, unpack(ids))) do
    places[2 * i - 1], places[2 * i] = at, ids[i]
  end
  call('ZADD', q.returning, unpack(places))
end

local function gather()
  local ids = take_tentative(q, step)
  if #ids > 0 then
    call('HSET', q.state, 'learned', tonumber(state[4]) - #ids)
    finish(q, groups, prompts, ids)
    return 1
  end
  ids = take_tentative(q, '+inf')
  if #ids > 0 then
    call('HSET', q.state, 'learned', tonumber(state[4]) - #ids)
    to_return(ids)
    return 1
  end
  local alone
  local due = call('ZRANGEBYSCORE', q.leases, '-inf', text(now_ms()), 'LIMIT', 0, MAX_LEASES)
  local tokens = #due > 0 and due or call('ZRANGE', q.leases, 0, MAX_LEASES - 1)
  if #tokens == 0 then return 0 end
  ids, alone = end_leases(q, tokens, MAX_ITEMS)
  call('HSET', q.state, 'leased', tonumber(state[3]) - #ids)
  if #due > 0 then note_crashes(q, ids, alone) end
  to_return(ids)
  return 1
end

local function settle()
  local found = {}
  for i = 4, #ARGV do
    local id = ARGV[i]
    if call('ZREM', q.returning, id) == 1 or call('ZREM', q.delayed, id) == 1 or call('SREM', q.parked, id) == 1
      or call('LREM', q.ready, 1, id) == 1 then
      found[#found + 1] = id
    end
  end
  if #found > 0 then finish(q, groups, prompts, found) end
  return 0
end

local function give_back()
  local popped, ids = call('ZPOPMAX', q.returning, MAX_ITEMS), {}
  for i = #popped - 1, 1, -2 do ids[#ids + 1] = popped[i] end
  if #ids > 0 then
    push_head(q, bury_crashed(q, groups, ids))
    return 1
  end
  call('HDEL', q.state, 'restoring')
  wake(q)
  return 0
end

if stage == 'open' then return open() end
if session ~= (state[1] or '0') then return {'session', state[1] or '0'} end
local stages = {gather = gather, settle = settle, finish = give_back}
local more = stages[stage]()
-- Nothing was written, and keeping a reply would be the growing first write that a server out of memory refuses.
if stage == 'gather' and more == 0 then return {'ok', session, 0} end
return keep(run, {'ok', session, more})
