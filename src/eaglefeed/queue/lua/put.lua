-- put: adds items at the tail, for every group. All of them or, on a conflict, a closed or a full queue, none.
--
-- KEYS
--   digest      HASH  id -> digest of its payload, of all that was ever put
--   ref         HASH  id -> payload, of all that is kept
--   seq         ZSET  id by place in put order, of all that is not released
--   bytes       HASH  id -> stored bytes, where not 0
--   pending     HASH  id -> groups that have neither done it nor hold it dead; only with several groups
--   ctl         HASH  stored, full, closed, groups and the limits
--   room        LIST  at most 64 tokens that waiting producers pop
--   each.ready  LIST  ids, the head is leased next
--   each.wake   LIST  at most 4 tokens that waiting leases pop
--   run.replay  HASH  call -> sequence number and reply of this client's last one
-- ARGV   groups as the client knows them; id, payload, digest, stored bytes; and so on, at most 1,000 items
-- Reply  {ok, accepted, depth} | {conflict, id} | {closed} | {full, depth, max_depth} | {groups, those declared}
local before = earlier(run)
if before then return before end
local names, ids = table.remove(ARGV, 1), {}
for i = 1, #ARGV, 4 do ids[#ids + 1] = ARGV[i] end
local known = call('HMGET', q.digest, unpack(ids))
local new, seen = {}, {}
for i, id in ipairs(ids) do
  local payload, digest, bytes = ARGV[4 * i - 2], ARGV[4 * i - 1], ARGV[4 * i]
  local former = known[i] or seen[id]
  if not former then
    seen[id] = digest
    new[#new + 1] = {id, payload, digest, bytes}
  elseif former ~= digest then
    return {'conflict', id}
  end
end

local depth = call('ZCARD', q.seq)
if #new == 0 then return {'ok', 0, depth} end
local ctl = read_ctl(q)
if (ctl.groups or names) ~= names then return {'groups', ctl.groups} end
if ctl.closed then return {'closed'} end
if depth + #new > ctl.max_depth then return {'full', depth, ctl.max_depth} end
if not ctl.groups then call('HSET', q.ctl, 'groups', names) end
add(q, groups, new, ctl, depth)
return keep(run, {'ok', #new, depth + #new})
