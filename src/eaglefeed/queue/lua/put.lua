-- put: adds items at the tail. All of them or, on a conflict, a closed or a full queue, none.
--
-- KEYS
--   digest      HASH  id -> digest of its payload, of all that was ever put
--   ref         HASH  id -> payload, of all that is not done
--   seq         ZSET  id by place in put order, of all that is unsettled
--   ready       LIST  ids, the head is leased next
--   bytes       HASH  id -> stored bytes, where not 0
--   ctl         HASH  seq, stored, full, closed and the limits
--   wake        LIST  at most 4 tokens that waiting leases pop
-- ARGV   id, payload, digest, stored bytes; and so on, at most 1,000 items
-- Reply  {ok, accepted, depth} | {conflict, id} | {closed} | {full, depth, max_depth}
local ids = {}
for i = 1, #ARGV, 4 do ids[#ids + 1] = ARGV[i] end
local known = call('HMGET', q.digest, unpack(ids))
local new, seen = {}, {}
for i, id in ipairs(ids) do
  local payload, digest, bytes = ARGV[4 * i - 2], ARGV[4 * i - 1], ARGV[4 * i]
  local earlier = known[i] or seen[id]
  if not earlier then
    seen[id] = digest
    new[#new + 1] = {id, payload, digest, bytes}
  elseif earlier ~= digest then
    return {'conflict', id}
  end
end

local depth = call('ZCARD', q.seq)
if #new > 0 then
  local ctl = call('HMGET', q.ctl, 'closed', 'max_depth')
  local max_depth = tonumber(ctl[2] or DEFAULTS.max_depth)
  if ctl[1] == '1' then return {'closed'} end
  if depth + #new > max_depth then return {'full', depth, max_depth} end
  add(q, new)
end
return {'ok', #new, depth + #new}
