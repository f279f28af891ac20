-- append: keeps a fact as the next one of its kind, as long as there are not too many, and adds to the kind's totals.
--
-- KEYS
--   run.journal_facts   HASH  name -> when it was noted, ms, and on the next line its value
--   run.journal_totals  HASH  name -> count
--   run.replay  HASH  call -> sequence number and reply of this client's last one
-- ARGV   kind, value, most facts of a kind; then names of totals and what is added to each
-- Reply  {number of facts of this kind}
local before = earlier(run)
if before then return before end
local number = call('HINCRBY', run.journal_totals, ARGV[1] .. '.count', 1)
if number <= tonumber(ARGV[3]) then
  call('HSET', run.journal_facts, ARGV[1] .. ':' .. number, text(now_ms()) .. '\n' .. ARGV[2])
end
for i = 4, #ARGV, 2 do call('HINCRBY', run.journal_totals, ARGV[1] .. '.' .. ARGV[i], ARGV[i + 1]) end
return keep(run, {number})
