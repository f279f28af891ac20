-- forget: drops released items, once their shards are gone. Safe to repeat; what is not released stays.
--
-- KEYS
--   released    LIST  ids whose shards may go, a line each, of one settlement
--   ref         HASH  id -> payload, of all that is kept
--   bytes       HASH  id -> stored bytes, where not 0
--   ctl         HASH  released: how many are
-- ARGV   ids, of those that `released` told: it reads the same first entries
-- Reply  how many were dropped
local entries, asked, gone, rest = call('LRANGE', q.released, 0, 127), {}, {}, {}
for _, id in ipairs(ARGV) do asked[id] = true end
for _, joined in ipairs(entries) do
  local left = {}
  for _, id in ipairs(lines_of(joined)) do table.insert(asked[id] and gone or left, id) end
  if #left > 0 then table.insert(rest, 1, table.concat(left, '\n')) end
end
if #gone == 0 then return 0 end
call('LTRIM', q.released, #entries, -1)
for _, key in ipairs({q.ref, q.bytes}) do call('HDEL', key, unpack(gone)) end
if #rest > 0 then call('LPUSH', q.released, unpack(rest)) end
call('HINCRBY', q.ctl, 'released', -#gone)
return #gone
