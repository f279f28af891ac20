-- configure: stores the queue's limits, declares its groups once, and looks at its room again.
--
-- KEYS
--   ctl         HASH  the limits, groups; stored, full
--   seq         ZSET  id by place in put order, of all that is not released
--   room        LIST  at most 64 tokens that waiting producers pop
-- ARGV   groups, sorted, a space between them, or "" to declare none; field, value of the limits; and so on
-- Reply  {ok} | {groups, those declared before}
local names = table.remove(ARGV, 1)
local declared = call('HGET', q.ctl, 'groups')
if names ~= '' then
  if declared and declared ~= names then return {'groups', declared} end
  call('HSET', q.ctl, 'groups', names)
end
call('HSET', q.ctl, unpack(ARGV))
update_room(q, read_ctl(q), call('ZCARD', q.seq))
return {'ok'}
