-- note: keeps a fact of the run in the place of an earlier one of that name.
--
-- KEYS
--   run.journal_facts  HASH  name -> when it was noted, ms, and on the next line its value
-- ARGV   name, value
call('HSET', run.journal_facts, ARGV[1], text(now_ms()) .. '\n' .. ARGV[2])
return 1
