------------------------------ MODULE LockWatch ------------------------------
(* The lock-watch of docs/positions.md: one stream, its sequence, sessions that take ids and end their transactions in
   any order, and a daemon that polls. docs/dev/specs.md explains the model and names the code of each action.

   Assumed of Postgres, each with a test that docs/positions.md names under "Assumptions":
   lock_before_id, sequence_is_locked, locks_are_listed, one_look, names_are_used_once,
   visible_before_unlock, ids_only_grow, no_torn_read, flush_keeps_the_value, prepared_stay_listed, snapshot_after_lock.

   `Off` is the set of rules that are switched off: {} in all_rules.cfg, one rule in every without_*.cfg. *)
EXTENDS Integers, TLC

CONSTANTS
    Writers,      \* sessions that insert rows, one transaction each at a time
    MaxId,        \* the sequence ends here, which keeps the model finite
    Off           \* the rules that are switched off

Rule(name) == name \notin Off
Unknown == -1     \* a position or a bound of which nothing is known; below all others, so it publishes nothing
Free == MaxId + 1 \* above all bounds: of a transaction that was not listed
NoId == MaxId + 1 \* of a transaction that has taken no id

VARIABLES
    seq,          \* last value of the sequence
    onDisk,       \* the last value that a crash leaves
    state,        \* of each session: idle, open, prepared, visible (committed, locks still held), unlocked
    first,        \* the smallest id that its transaction has taken and may still insert
    spare,        \* an id that the session keeps for later (only with CACHE above 1)

    step,         \* the daemon's next step: value, locks, publish; lost without a connection
    last,         \* L(k-1); from the list of locks on L(k)
    reading,      \* L(k), until the locks are listed
    bound,        \* of each transaction, as of the last list
    lowest,       \* the smallest bound of the last list; Free when it was empty
    limit,        \* the last value that the daemon knows to be on disk
    position,     \* what was published
    unseen,       \* ids that became visible since step 1 (only where rows are read before the locks)
    missed        \* ids that the statement which read the rows up to the position could not see

database == <<seq, onDisk, state, first, spare>>
daemon == <<step, last, reading, bound, lowest, limit, position, missed>>
vars == <<database, daemon, unseen>>

Least(set) == CHOOSE x \in set : \A y \in set : x <= y
Min(a, b) == IF a <= b THEN a ELSE b
Max(a, b) == IF a >= b THEN a ELSE b

Init ==
    /\ seq = 0 /\ onDisk = 0
    /\ state = [w \in Writers |-> "idle"] /\ first = [w \in Writers |-> NoId] /\ spare = [w \in Writers |-> NoId]
    /\ step = IF Rule("last_value_before_locks") THEN "value" ELSE "locks"
    /\ last = Unknown /\ reading = Unknown
    /\ bound = [w \in Writers |-> Free] /\ lowest = Free
    /\ position \in {Unknown, 0}   \* a stream that was never published, and one that was
    /\ limit = position /\ unseen = {} /\ missed = {}

(* ---- the sessions that write ---- *)

Begin(w) == \* INSERT locks the table
    /\ state[w] = "idle"
    /\ state' = [state EXCEPT ![w] = "open"]
    /\ UNCHANGED <<seq, onDisk, first, spare, daemon, unseen>>

Take(w) == \* nextval() in the column default
    /\ state[w] = "open" \/ (state[w] = "idle" /\ ~Rule("lock_before_id"))
    /\ IF spare[w] # NoId
       THEN /\ first' = [first EXCEPT ![w] = Min(@, spare[w])]
            /\ spare' = [spare EXCEPT ![w] = NoId]
            /\ UNCHANGED seq
       ELSE LET cache == IF Rule("cache_1") THEN 1 ELSE 2 IN
            /\ seq + cache <= MaxId
            /\ seq' = seq + cache
            /\ first' = [first EXCEPT ![w] = Min(@, seq + 1)]
            /\ spare' = IF cache = 2 THEN [spare EXCEPT ![w] = seq + 2] ELSE spare
    /\ UNCHANGED <<onDisk, state, daemon, unseen>>

Ended(w) == \* its locks are released; the name of a transaction that ended is never listed again
    /\ state' = [state EXCEPT ![w] = "idle"]
    /\ first' = [first EXCEPT ![w] = NoId]
    /\ bound' = [bound EXCEPT ![w] = Free]
    /\ UNCHANGED <<seq, spare, step, last, reading, lowest, limit, position, missed>>

Visible(w) == \* its rows are visible from now on
    unseen' = IF Rule("rows_after_locks") \/ first[w] = NoId THEN unseen ELSE unseen \union {first[w]}

Commit(w) ==
    /\ state[w] \in {"open", "prepared"}
    /\ onDisk' \in {onDisk, seq}   \* with synchronous_commit off and on
    /\ IF Rule("visible_before_unlock")
       THEN /\ state' = [state EXCEPT ![w] = "visible"]
            /\ first' = [first EXCEPT ![w] = NoId]
            /\ Visible(w)
       ELSE /\ state' = [state EXCEPT ![w] = "unlocked"]
            /\ UNCHANGED <<first, unseen>>
    /\ UNCHANGED <<seq, spare, daemon>>

Finish(w) == \* the other half of a commit
    /\ state[w] \in {"visible", "unlocked"}
    /\ Visible(w)
    /\ Ended(w)
    /\ UNCHANGED onDisk

Rollback(w) == \* flushes nothing
    /\ state[w] \in {"open", "prepared"}
    /\ Ended(w)
    /\ UNCHANGED <<onDisk, unseen>>

Prepare(w) == \* PREPARE TRANSACTION; it may be listed under another name from now on
    /\ state[w] = "open" /\ first[w] # NoId
    /\ state' = [state EXCEPT ![w] = "prepared"]
    /\ onDisk' = seq
    /\ bound' \in {bound, [bound EXCEPT ![w] = Free]}
    /\ UNCHANGED <<seq, first, spare, step, last, reading, lowest, limit, position, unseen, missed>>

Writing == \E w \in Writers : Begin(w) \/ Take(w) \/ Commit(w) \/ Finish(w) \/ Rollback(w) \/ Prepare(w)

(* ---- what interrupts ---- *)

Crash == \* Postgres is killed: prepared transactions and what was flushed survive
    LET lives(w) == state[w] = "prepared" IN
    /\ seq' = onDisk
    /\ state' = [w \in Writers |-> IF lives(w) THEN "prepared" ELSE "idle"]
    /\ first' = [w \in Writers |-> IF lives(w) THEN first[w] ELSE NoId]
    /\ spare' = [w \in Writers |-> NoId]
    /\ bound' = [w \in Writers |-> Free]   \* all names change
    /\ step' = "lost" /\ reading' = Unknown /\ unseen' = {}
    /\ UNCHANGED <<onDisk, last, lowest, limit, position, missed>>

Disconnect == \* Postgres goes on, the daemon's session has ended
    /\ step' = "lost" /\ reading' = Unknown /\ unseen' = {}
    /\ UNCHANGED <<database, last, bound, lowest, limit, position, missed>>

Reconnect ==
    /\ step = "lost"
    /\ step' = IF Rule("last_value_before_locks") THEN "value" ELSE "locks"
    /\ IF Rule("forget_after_reconnect")
       THEN last' = Unknown /\ bound' = [w \in Writers |-> Free] /\ lowest' = Free /\ limit' = position
       ELSE UNCHANGED <<last, bound, lowest, limit>>
    /\ UNCHANGED <<database, reading, position, unseen, missed>>

(* ---- a poll ---- *)

Listed == {w \in Writers : state[w] \in {"open", "visible"} \/ (state[w] = "prepared" /\ Rule("prepared_are_listed"))}

Bounds == \* of a list that is made now
    LET fresh == IF ~Rule("previous_last_value") THEN reading
                 ELSE IF last # Unknown THEN last
                 ELSE IF Rule("first_poll_trusts_the_published") THEN position ELSE reading
        inherited == IF lowest # Free THEN lowest ELSE fresh
    IN [w \in Writers |->
            IF w \notin Listed THEN Free
            ELSE IF bound[w] # Free /\ Rule("listed_keep_their_bound") THEN bound[w]
            ELSE IF state[w] = "prepared" /\ Rule("prepared_inherit_the_lowest") THEN inherited
            ELSE fresh]

ReadLast == \* step 1
    /\ step = "value"
    /\ reading' \in IF Rule("no_torn_read") THEN {seq} ELSE {seq, Min(seq + 1, MaxId)}
    /\ IF Rule("last_value_before_locks")
       THEN step' = (IF reading' = last /\ lowest = Free THEN "publish" ELSE "locks") /\ UNCHANGED last
       ELSE step' = "publish" /\ last' = reading'
    /\ unseen' = {}
    /\ UNCHANGED <<database, bound, lowest, limit, position, missed>>

ListLocks == \* steps 2 to 4
    /\ step = "locks"
    /\ bound' = Bounds
    /\ lowest' = Least({bound'[w] : w \in Writers})
    /\ IF Rule("last_value_before_locks")
       THEN step' = "publish" /\ last' = reading /\ reading' = Unknown
       ELSE step' = "value" /\ UNCHANGED <<last, reading>>
    /\ UNCHANGED <<database, limit, position, unseen, missed>>

ListAgain == \* a later list for the same last value: steps 2 to 4 of a poll that has left out step 1
    /\ step = "publish" /\ Rule("last_value_before_locks") /\ Rule("previous_last_value")
    /\ bound' = Bounds
    /\ lowest' = Least({bound'[w] : w \in Writers})
    /\ UNCHANGED <<database, step, last, reading, limit, position, unseen, missed>>

Publish == \* steps 5 and 6: L(k) is on disk, or is flushed now, or the flush is left to a later poll
    /\ step = "publish"
    /\ \/ last <= onDisk /\ limit' = Max(limit, last) /\ UNCHANGED onDisk
       \/ last > onDisk /\ onDisk' = seq /\ limit' = Max(limit, last)
       \/ ~Rule("flush_before_publishing") /\ limit' = Max(limit, last) /\ UNCHANGED onDisk
       \/ UNCHANGED <<limit, onDisk>>
    /\ position' = Max(position, Min(Min(lowest, last), limit'))
    /\ missed' = {id \in unseen : position < id /\ id <= position'}
    /\ step' = IF Rule("last_value_before_locks") THEN "value" ELSE "locks"
    /\ reading' = Unknown /\ unseen' = {}
    /\ UNCHANGED <<seq, state, first, spare, last, bound, lowest>>

Polling == ReadLast \/ ListLocks \/ ListAgain \/ Publish

Next == Writing \/ Crash \/ Disconnect \/ Reconnect \/ Polling
Spec == Init /\ [][Next]_vars

(* ---- what must hold ---- *)

(* No transaction that has not committed has an id at or below the position, and none was overlooked by the statement
   that read the rows: so no row can turn up behind the readers. *)
NoLateRow ==
    /\ \A w \in Writers : first[w] > position
    /\ missed = {}

(* The sequence does not give out an id at or below the position again. *)
NoIdAgain == position <= seq

Symmetry == Permutations(Writers)
=============================================================================
