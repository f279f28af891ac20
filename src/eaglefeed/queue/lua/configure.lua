-- configure: stores the queue's limits and looks at its room again.
--
-- KEYS
--   ctl         HASH  the limits; stored, full
--   seq         ZSET  id by place in put order, of all that is unsettled
-- ARGV   field, value; and so on
call('HSET', q.ctl, unpack(ARGV))
update_room(q)
return 1
