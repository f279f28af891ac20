-- handoff: puts a prompt's sample and settles the prompt, fenced by the prompt's lease.
--
-- The prompt goes first, since that frees memory; a sample is never refused for room or a closed queue. Safe to repeat:
-- a sample that is there with the same digest was handed off by this very call.
--
-- KEYS
--   prompts.owner       HASH  id -> token of the lease that holds it
--   prompts.open        HASH  token -> number of its items that are not settled
--   prompts.leases      ZSET  token by deadline, ms
--   prompts.lease       HASH  token -> consumer and ids, a line each
--   prompts.ref         HASH  id -> payload, of all that is not done
--   prompts.seq         ZSET  id by place in put order, of all that is unsettled
--   prompts.bytes       HASH  id -> stored bytes, where not 0
--   prompts.deliveries  HASH  id -> times leased
--   prompts.crashes     HASH  id -> lone crashes
--   prompts.errors      HASH  id -> reason of its last nack
--   prompts.ctl         HASH  stored, full and the limits
--   samples.digest      HASH  id -> digest of its payload, of all that was ever put
--   samples.ref         HASH  id -> payload, of all that is not done
--   samples.seq         ZSET  id by place in put order, of all that is unsettled
--   samples.ready       LIST  ids, the head is leased next
--   samples.bytes       HASH  id -> stored bytes, where not 0
--   samples.ctl         HASH  seq, stored, full and the limits
--   samples.wake        LIST  at most 4 tokens that waiting leases pop
-- ARGV   token, prompt id, sample id, payload, digest, stored bytes
-- Reply  ok | stale | conflict
local token, prompt, sample, digest = ARGV[1], ARGV[2], ARGV[3], ARGV[5]
local known = call('HGET', samples.digest, sample)
if call('HGET', prompts.owner, prompt) ~= token then
  return known == digest and 'ok' or 'stale'
end
if known and known ~= digest then return 'conflict' end
release(prompts, token, {prompt})
settle(prompts, {prompt})
if not known then add(samples, {{sample, ARGV[4], digest, ARGV[6]}}) end
return 'ok'
