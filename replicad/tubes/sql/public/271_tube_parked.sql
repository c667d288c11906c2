-- tube_parked_list(tube): the parked ids of one tube or (NULL) of all, the oldest first. Writes nothing.
CREATE OR REPLACE FUNCTION tube_parked_list(tube text = NULL) RETURNS SETOF tube_parked
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT p.* FROM tube_parked p WHERE $1 IS NULL OR p.tube = $1 ORDER BY p.parked
$$;
COMMENT ON FUNCTION tube_parked_list(text) IS 'Lists what failed too often';

-- tube_parked_replay(tube, parked_ids): puts entries of tube_parked, by their number or (NULL) all, back into the tube
-- as new pods, the oldest first; returns how many entries. Raises RT001. Writes tube_parked and the tube.
CREATE OR REPLACE FUNCTION tube_parked_replay(tube text, parked_ids bigint[] = NULL) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_keep(tube);
    replayed bigint;
BEGIN
    EXECUTE format($sql$
        WITH gone AS (
            DELETE FROM tube_parked p WHERE p.tube = $1 AND ($2 IS NULL OR p.parked = ANY ($2)) RETURNING p.*
        )
        INSERT INTO %I (op, shard, ids, payload) SELECT g.op, g.shard, g.ids, g.payload FROM gone g ORDER BY g.parked
    $sql$, t.tube) USING tube, parked_ids;
    GET DIAGNOSTICS replayed = ROW_COUNT;
    RETURN replayed;
END
$$;
COMMENT ON FUNCTION tube_parked_replay(text, bigint[]) IS 'Puts what failed too often back into its tube';

-- tube_parked_drop(tube, parked_ids): deletes entries of tube_parked, by their number or (NULL) all; returns how many.
-- Raises RT001. Writes tube_parked.
CREATE OR REPLACE FUNCTION tube_parked_drop(tube text, parked_ids bigint[] = NULL) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    t tube_registry := tube_keep(tube);
    dropped bigint;
BEGIN
    DELETE FROM tube_parked p WHERE p.tube = t.tube AND (parked_ids IS NULL OR p.parked = ANY (parked_ids));
    GET DIAGNOSTICS dropped = ROW_COUNT;
    RETURN dropped;
END
$$;
COMMENT ON FUNCTION tube_parked_drop(text, bigint[]) IS 'Forgets what failed too often';
