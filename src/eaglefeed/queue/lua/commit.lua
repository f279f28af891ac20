-- commit: settles for good what was acknowledged at a step or before, about 1,000 items a call.
--
-- KEYS
--   tentative   ZSET  ids of one ack, a line each, by the step that learned them
--   state       HASH  session, committed; learned: ids that are tentative
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
-- ARGV   step, session
-- Reply  {ok, how many were settled, 1 if there are more} | {session, the newest one}
local before = earlier(run)
if before then return before end
local step, state = ARGV[1], call('HMGET', q.state, 'session', 'committed', 'learned')
local newest = state[1] or '0'
if ARGV[2] ~= newest then return {'session', newest} end
local ids, committed = take_tentative(q, step), state[2] or '0'
if tonumber(step) > tonumber(committed) then
  if #ids == 0 then call('HDEL', q.state, 'committed') end
  committed = step
elseif #ids == 0 then
  return {'ok', 0, 0}
end
call('HSET', q.state, 'committed', committed, 'learned', tonumber(state[3] or 0) - #ids)
if #ids == 0 then return {'ok', 0, 0} end
finish(q, groups, prompts, ids)
return keep(run, {'ok', #ids, call('ZCOUNT', q.tentative, '-inf', step) > 0 and 1 or 0})
