-- Publishes lines, in one step that nothing can come between, unless a publisher with a higher term has begun.
-- KEYS[1]: the hash of the publisher; ARGV: term, seconds that the hash is kept, address of the daemon (may be empty), the
-- channel of the server, that of the stream; then pairs: 1 (for the first channel), 2 (for the second) or 3 (for both), and a
-- line. Returns the number of subscribers that the last line reached; an error where the term is too low.
-- A Redis that is full keeps no hash, and publishes all the same.
local term = redis.call('HGET', KEYS[1], 'term')
if term and tonumber(term) > tonumber(ARGV[1]) then
    return redis.error_reply('STALE term ' .. term)
end
if term == ARGV[1] then
    redis.call('EXPIRE', KEYS[1], ARGV[2])
else
    local kept = redis.pcall('HSET', KEYS[1], 'term', ARGV[1], 'address', ARGV[3])
    if type(kept) == 'table' and kept.err and string.sub(kept.err, 1, 3) ~= 'OOM' then
        return kept
    end
    redis.pcall('EXPIRE', KEYS[1], ARGV[2])
end
local reached = 0
for i = 6, #ARGV, 2 do
    if ARGV[i] ~= '2' then
        reached = redis.call('PUBLISH', ARGV[4], ARGV[i + 1])
    end
    if ARGV[i] ~= '1' then
        reached = redis.call('PUBLISH', ARGV[5], ARGV[i + 1])
    end
end
return reached
