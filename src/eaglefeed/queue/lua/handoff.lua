-- handoff: puts a prompt's sample and settles the prompt, fenced by the prompt's lease. With a holder, the prompt is
-- held until its sample ends, since the tensors stay with that producer.
--
-- The prompt goes first, since that frees memory; a sample is never refused for room or a closed queue. Safe to repeat:
-- a sample that is there with the same digest was handed off by this very call.
--
-- KEYS
--   prompts.leases      ZSET  token by deadline, ms
--   prompts.state       HASH  leases; leased: ids in them
--   prompts.held        HASH  id -> producer that its sample's tensors stay with
--   prompts.ref         HASH  id -> payload, of all that is kept
--   prompts.seq         ZSET  id by place in put order, of all that is not released
--   prompts.bytes       HASH  id -> stored bytes, where not 0
--   prompts.released    LIST  ids whose shards may go, a line each, of one settlement
--   prompts.dead        HASH  id -> reason
--   prompts.deliveries  HASH  id -> deliveries that ended unsettled
--   prompts.crashes     HASH  id -> lone crashes
--   prompts.errors      HASH  id -> reason of its last nack
--   prompts.ctl         HASH  stored, full, released and the limits
--   prompts.room        LIST  at most 64 tokens that waiting producers pop
--   samples.digest      HASH  id -> digest of its payload, of all that was ever put
--   samples.ref         HASH  id -> payload, of all that is kept
--   samples.seq         ZSET  id by place in put order, of all that is not released
--   samples.bytes       HASH  id -> stored bytes, where not 0
--   samples.pending     HASH  id -> groups that have neither done it nor hold it dead; only with several groups
--   samples.recalled    SET   ids whose tensors are gone
--   samples.ctl         HASH  stored, full, groups and the limits
--   samples.room        LIST  at most 64 tokens that waiting producers pop
--   each.ready  LIST  ids, the head is leased next
--   each.parked SET   ids that are back, and whose tensors are gone
--   each.dead   HASH  id -> reason
--   each.wake   LIST  at most 4 tokens that waiting leases pop
--   run.replay  HASH  call -> sequence number and reply of this client's last one
-- ARGV   groups of the samples as the client knows them, token, prompt id, holder or "-", sample id, payload, digest,
--        stored bytes
-- Reply  {ok} | {stale} | {conflict} | {groups, those declared}
local before = earlier(run)
if before then return before end
local names, token, prompt, holder = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local sample, payload, digest, bytes = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local known = call('HGET', samples.digest, sample)

-- Whether the sample's payload is there for somebody who has not done it.
local function is_kept()
  return call('ZSCORE', samples.seq, sample) or next(buried(groups, {sample})) ~= nil
end

local function leave_lease(kept)
  local state = call('HMGET', prompts.state, 'leased', token)
  leave(prompts, token, state[2], prompt, state[1])
  if kept and holder ~= '-' then
    call('HSET', prompts.held, prompt, holder)
  else
    finish_prompts(prompts, {prompt})
  end
end

-- The tensors of an earlier hand-off are gone: these take their place.
local function replace()
  if call('ZSCORE', samples.seq, sample) then
    local change = tonumber(bytes) - tonumber(call('HGET', samples.bytes, sample) or 0)
    call('HINCRBY', samples.ctl, 'stored', text(change))
    update_room(samples, read_ctl(samples), call('ZCARD', samples.seq))
  end
  call('HDEL', samples.bytes, sample)
  if bytes ~= '0' then call('HSET', samples.bytes, sample, bytes) end
  call('HSET', samples.ref, sample, payload)
  call('HSET', samples.digest, sample, digest)
  for _, group in ipairs(groups) do
    if call('SREM', group.parked, sample) == 1 then
      call('RPUSH', group.ready, sample)
      wake(group)
    end
  end
end

if not holds(prompts, token, prompt) then
  return {known == digest and 'ok' or 'stale'}
end
if call('SISMEMBER', samples.recalled, sample) == 1 then
  call('SREM', samples.recalled, sample)
  local kept = is_kept()
  leave_lease(kept)
  if kept then replace() end
  return keep(run, {'ok'})
end
if known and known ~= digest then return {'conflict'} end
if known then
  leave_lease(is_kept())
  return keep(run, {'ok'})
end
local ctl = read_ctl(samples)
if (ctl.groups or names) ~= names then return {'groups', ctl.groups} end
leave_lease(true)
if not ctl.groups then call('HSET', samples.ctl, 'groups', names) end
add(samples, groups, {{sample, payload, digest, bytes}}, ctl, call('ZCARD', samples.seq))
return keep(run, {'ok'})
