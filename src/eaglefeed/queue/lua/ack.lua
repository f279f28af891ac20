-- ack: settles items, for good or tentatively until their step is committed. An id that the lease does not hold (any
-- more) is stale and stays as it is; an older session settles nothing.
--
-- KEYS
--   leases      ZSET  token by deadline, ms
--   tentative   ZSET  ids of one ack, a line each, by the step that learned them
--   state       HASH  session, leases; leased and learned: ids in leases, and tentative ones
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
-- ARGV   token, session, step or "-", ids, a line each
-- Reply  {ok, a 1 (settled) or 0 (stale) for each id} | {session, the newest one}
local before = earlier(run)
if before then return before end
local token, step = ARGV[1], ARGV[3]
local state = call('HMGET', q.state, 'session', 'leased', 'learned', token)
local newest = state[1] or '0'
if ARGV[2] ~= newest then return {'session', newest} end
local flags, mine = leave(q, token, state[4], ARGV[4], state[2], step ~= '-' and (state[3] or 0))
if #mine == 0 then return {'ok', flags} end
if step == '-' then
  finish(q, groups, prompts, mine)
else
  call('ZADD', q.tentative, step, #mine == #flags and ARGV[4] or table.concat(mine, '\n'))
end
return keep(run, {'ok', flags})
