-- Prepended to every script behind common.lua: how items leave their leases, come back, and end.

-- Whether a lease holds an id.
local function holds(q, token, id)
  local lease = call('HGET', q.state, token)
  return lease and string.find(lease .. '\n', '\n' .. id .. '\n', 1, true) ~= nil
end

-- The lease without some of its ids, a line each, that stand next to each other in it; nil where it does not hold them so.
local function without(lease, joined)
  local from, to = string.find(lease, '\n' .. joined, 1, true)
  if not from or to < #lease and string.byte(lease, to + 1) ~= 10 then return nil end -- 10: \n
  return string.sub(lease, 1, from - 1) .. string.sub(lease, to + 1)
end

-- The lease without those of `ids` that it holds; a text of 1 (it held the id) and 0 for each, and the ids it held.
local function pick(lease, ids)
  local lines, held, flags, mine = lines_of(lease), {}, {}, {}
  for i = 2, #lines do held[lines[i]] = true end
  for i, id in ipairs(ids) do
    flags[i] = held[id] and '1' or '0'
    if held[id] then mine[#mine + 1], held[id] = id, nil end
  end
  local rest = {lines[1]}
  for i = 2, #lines do
    if held[lines[i]] then rest[#rest + 1] = lines[i] end
  end
  return table.concat(rest, '\n'), table.concat(flags), mine
end

-- Takes ids, a line each, out of a lease, which ends with its last one. Returns a text of 1 (it held the id) and 0 for
-- each, and the ids it held. A repeated id is held once. `leased` counts the ids in all leases, and `learned`, if it is
-- given, those that are tentative: they become so.
local function leave(q, token, lease, joined, leased, learned)
  local ids = lines_of(joined)
  if not lease then return string.rep('0', #ids), {} end
  local rest, flags, mine = without(lease, joined), string.rep('1', #ids), ids
  if not rest then rest, flags, mine = pick(lease, ids) end
  if #mine == 0 then return flags, mine end
  local fields, is_over = {'leased', tonumber(leased) - #mine}, not string.find(rest, '\n', 1, true)
  if learned then fields[3], fields[4] = 'learned', tonumber(learned) + #mine end
  -- The first write must need no memory; HDEL of no field is one, and goes neither to the file nor to replicas.
  call('HDEL', q.state, is_over and token or '')
  if is_over then
    call('ZREM', q.leases, token)
  else
    fields[#fields + 1], fields[#fields + 2] = token, rest
  end
  call('HSET', q.state, unpack(fields))
  return flags, mine
end

-- Ends as many of the leases `tokens` as hold at most `most` ids, the first in any case. Returns how many, the ids they
-- held, and which of those were leased alone.
local function end_leases(q, tokens, most)
  local ended, ids, alone = {}, {}, {}
  for i, lease in ipairs(call('HMGET', q.state, unpack(tokens))) do
    local lines = lines_of(lease)
    if i > 1 and #ids + #lines - 1 > most then break end
    ended[i] = tokens[i]
    local lone = string.sub(lines[1], 1, 2) == '1 '
    for k = 2, #lines do ids[#ids + 1], alone[#ids + 1] = lines[k], lone end
  end
  call('HDEL', q.state, unpack(ended))
  call('ZREM', q.leases, unpack(ended))
  return ids, alone
end

-- Takes acks of steps up to `step` off the tentative ones, about 1,000 ids. Returns the ids.
local function take_tentative(q, step)
  local acks, ids, taken = call('ZRANGEBYSCORE', q.tentative, '-inf', step, 'LIMIT', 0, 128), {}, 0
  for i, joined in ipairs(acks) do
    local lines = lines_of(joined)
    if i > 1 and #ids + #lines > 1000 then break end
    for _, id in ipairs(lines) do ids[#ids + 1] = id end
    taken = i
  end
  if taken > 0 then call('ZREMRANGEBYRANK', q.tentative, 0, taken - 1) end
  return ids
end

-- The ids that no group has to do any more, once this group has done or buried them.
local function last_of(q, groups, ids)
  if #groups == 1 then return ids end
  local last, fields = {}, {}
  for i, pending in ipairs(call('HMGET', q.pending, unpack(ids))) do
    if pending == '1' then
      last[#last + 1] = ids[i]
    else
      fields[#fields + 1], fields[#fields + 2] = ids[i], tonumber(pending) - 1
    end
  end
  if #last > 0 then call('HDEL', q.pending, unpack(last)) end
  if #fields > 0 then call('HSET', q.pending, unpack(fields)) end
  return last
end

-- A table of those of `ids` that some group holds dead.
local function buried(groups, ids)
  local found = {}
  for _, group in ipairs(groups) do
    if call('EXISTS', group.dead) == 1 then
      for i, reason in ipairs(call('HMGET', group.dead, unpack(ids))) do
        if reason then found[ids[i]] = true end
      end
    end
  end
  return found
end

-- Forgets what a group noted of items.
local function forget_counts(q, ids)
  if call('EXISTS', q.deliveries, q.crashes, q.errors) == 0 then return end
  for _, key in ipairs({q.deliveries, q.crashes, q.errors}) do call('HDEL', key, unpack(ids)) end
end

-- Takes items that no group has to do any more off the queue's places and bytes. One that is dead to a group keeps its
-- payload; of the others, one with a shard waits for that to be deleted. Returns the others.
local function retire(q, groups, ids)
  if #ids == 0 then return ids end
  call('ZREM', q.seq, unpack(ids))
  local dead, sum, gone, shards, plain = buried(groups, ids), 0, {}, {}, {}
  for i, bytes in ipairs(call('HMGET', q.bytes, unpack(ids))) do
    sum = sum + tonumber(bytes or 0)
    if not dead[ids[i]] then
      gone[#gone + 1] = ids[i]
      table.insert(bytes and shards or plain, ids[i])
    end
  end
  local ctl = call('HMGET', q.ctl, 'full', 'stored', 'released')
  if sum > 0 then
    local released = tonumber(ctl[3] or 0) + #shards
    call('HSET', q.ctl, 'stored', text(tonumber(ctl[2]) - sum), 'released', released)
  end
  if #plain > 0 then call('HDEL', q.ref, unpack(plain)) end
  if #shards > 0 then call('RPUSH', q.released, table.concat(shards, '\n')) end
  if ctl[1] == '1' then update_room(q, read_ctl(q), call('ZCARD', q.seq)) end
  return gone
end

-- Settles prompts for good; they have one group.
local function finish_prompts(prompts, ids)
  forget_counts(prompts, ids)
  retire(prompts, {prompts}, ids)
end

-- Settles items for good for this group, and ends the prompts whose tensors stayed with their producer for their sake.
local function finish(q, groups, prompts, ids)
  local notes = {q.deliveries, q.crashes, q.errors, prompts.held}
  for _, group in ipairs(groups) do notes[#notes + 1] = group.dead end
  if call('EXISTS', unpack(notes)) == 0 then
    retire(q, {}, last_of(q, groups, ids)) -- no item has a note: one look instead of many
    return
  end
  forget_counts(q, ids)
  local gone = retire(q, groups, last_of(q, groups, ids))
  if #gone == 0 or call('EXISTS', prompts.held) == 0 then return end
  local held = {}
  for i, holder in ipairs(call('HMGET', prompts.held, unpack(gone))) do
    if holder then held[#held + 1] = gone[i] end
  end
  if #held == 0 then return end
  call('HDEL', prompts.held, unpack(held))
  finish_prompts(prompts, held)
end

-- Makes items dead letters of this group; their payload, bytes and delivery count stay.
local function bury(q, groups, ids, reasons)
  local fields = {}
  for i, id in ipairs(ids) do
    fields[2 * i - 1], fields[2 * i] = id, reasons[i]
  end
  call('HSET', q.dead, unpack(fields))
  retire(q, groups, last_of(q, groups, ids))
end

-- Puts ids to the head of the ready items, in their order.
local function push_head(q, ids)
  local back, reversed = #ids > 0 and with_tensors(q, ids) or ids, {}
  if #back == 0 then return end
  for i = #back, 1, -1 do reversed[#reversed + 1] = back[i] end
  call('LPUSH', q.ready, unpack(reversed))
  wake(q)
end

-- Counts the deliveries of `ids` that just ended; returns the counts.
local function count_deliveries(q, ids)
  local counts, fields = {}, {}
  for i, before in ipairs(call('HMGET', q.deliveries, unpack(ids))) do
    counts[i] = tonumber(before or 0) + 1
    fields[2 * i - 1], fields[2 * i] = ids[i], counts[i]
  end
  call('HSET', q.deliveries, unpack(fields))
  return counts
end

-- Notes that the leases of `ids` ran out; only crashes of an item that was leased alone count against it.
local function note_crashes(q, ids, alone)
  local fields = {}
  for i, crashes in ipairs(call('HMGET', q.crashes, unpack(ids))) do
    fields[2 * i - 1], fields[2 * i] = ids[i], tonumber(crashes or 0) + (alone[i] and 1 or 0)
  end
  call('HSET', q.crashes, unpack(fields))
  count_deliveries(q, ids)
end

-- Buries those of `ids` that crashed alone too often; returns the others.
local function bury_crashed(q, groups, ids)
  if call('EXISTS', q.crashes) == 0 then return ids end
  local most, back, dead, reasons = tonumber(call('HGET', q.ctl, 'max_deliveries') or DEFAULTS.max_deliveries), {}, {}, {}
  local errors = call('HMGET', q.errors, unpack(ids))
  for i, crashes in ipairs(call('HMGET', q.crashes, unpack(ids))) do
    if crashes and tonumber(crashes) >= most then
      local told = errors[i] and '; last error: ' .. errors[i] or ''
      table.insert(dead, ids[i])
      table.insert(reasons, 'its lease ran out ' .. crashes .. ' times while it was leased alone' .. told)
    else
      table.insert(back, ids[i])
    end
  end
  if #dead > 0 then bury(q, groups, dead, reasons) end
  return back
end
