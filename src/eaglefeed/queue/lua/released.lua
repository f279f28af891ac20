-- released: some items whose shards may go, those first that were released first.
--
-- KEYS
--   released    LIST  ids whose shards may go, a line each, of one settlement
--   ref         HASH  id -> payload, of all that is kept
--   bytes       HASH  id -> stored bytes, where not 0
-- ARGV   how many at most
-- Reply  {ids, payloads, stored bytes}
local ids, most = {}, tonumber(ARGV[1])
for _, joined in ipairs(call('LRANGE', q.released, 0, 127)) do
  for _, id in ipairs(lines_of(joined)) do
    if #ids < most then ids[#ids + 1] = id end
  end
end
if #ids == 0 then return {{}, {}, {}} end
return {ids, call('HMGET', q.ref, unpack(ids)), call('HMGET', q.bytes, unpack(ids))}
