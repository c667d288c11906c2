----------------------------- MODULE Reservation -----------------------------
(* Reservation, as in docs/positions.md: ids that are taken ahead of their rows, under shared advisory locks that carry a
   bound; the guard on the table; and a daemon that polls. docs/dev/specs.md explains the model and names the code of each
   action.

   Sessions are free to try what a wrong program could do: any transaction may insert any id that was ever given out.
   The guard has to refuse each id that readers may have passed.

   Assumed of Postgres, each with a test that docs/positions.md names under "Assumptions":
   locks_are_listed, one_look, visible_before_unlock, ids_only_grow, no_torn_read,
   savepoints_end_locks_and_settings, sessions_end_with_their_locks.

   `Off` is the set of rules that are switched off: {} in all_rules_*.cfg, one rule in every without_*.cfg. *)
EXTENDS Integers, TLC

CONSTANTS
    Inserters,    \* sessions with transactions that call stream_next and insert, one at a time each
    Reservers,    \* sessions that reserve ids for longer than a transaction
    MaxId,        \* the sequence ends here, which keeps the model finite
    Savepoints,   \* whether transactions use a savepoint
    Off           \* the rules that are switched off

Rule(name) == name \notin Off
Sessions == Inserters \union Reservers
Free == MaxId + 1 \* no lock, no id
None == -1        \* no bound in the setting

VARIABLES
    seq,          \* last value of the sequence
    position,     \* what the daemon published
    step,         \* the daemon's next step: value, locks
    reading,      \* the last value that it read; None before it
    listed,       \* the lowest bound that it listed (only where the locks are listed first)

    at,           \* what each session does: idle, or the next step of the function that it is in
    seen,         \* the bound that this function has read
    wanted,       \* the id that is being inserted
    lock,         \* the lowest bound that the session's transaction holds
    setting,      \* the bound in the transaction-local setting, by which the guard judges
    row,          \* the smallest id that the transaction has inserted
    saved,        \* lock, setting and row at the savepoint; <<>> without one
    held,         \* bounds that the session holds until it completes its ids
    certified     \* those that have a certificate

daemon == <<position, step, reading, listed>>
transactions == <<lock, setting, row, saved>>
reservations == <<held, certified>>
vars == <<seq, daemon, at, seen, wanted, transactions, reservations>>

Least(set) == CHOOSE x \in set : \A y \in set : x <= y
Greatest(set) == CHOOSE x \in set : \A y \in set : x >= y
Min(a, b) == IF a <= b THEN a ELSE b
Max(a, b) == IF a >= b THEN a ELSE b
All(value) == [s \in Sessions |-> value]

Init ==
    /\ seq = 0 /\ position = 0 /\ reading = None /\ listed = Free
    /\ step = IF Rule("last_value_before_locks") THEN "value" ELSE "locks"
    /\ at = All("idle") /\ seen = All(None) /\ wanted = All(Free)
    /\ lock = All(Free) /\ setting = All(None) /\ row = All(Free) /\ saved = All(<<>>)
    /\ held = All({}) /\ certified = All({})

Idle(s) == at[s] = "idle"
Goes(s, next) == at' = [at EXCEPT ![s] = next]
Reads(s, value) == seen' = [seen EXCEPT ![s] = value]

(* ---- stream_next: an id for this transaction ---- *)

BeginNext(s) == \* reads the last value, if the transaction holds no bound yet
    /\ Idle(s) /\ seq < MaxId /\ setting[s] = None
    /\ Reads(s, seq)
    /\ Goes(s, IF Rule("lock_before_id") /\ Rule("bound_before_id") THEN "lock" ELSE "id")
    /\ UNCHANGED <<seq, daemon, wanted, transactions, reservations>>

LockNext(s) == \* takes the advisory lock and remembers it in the setting
    /\ at[s] = "lock"
    /\ lock' = [lock EXCEPT ![s] = Min(@, seen[s])]
    /\ setting' = [setting EXCEPT ![s] = seen[s]]
    /\ IF Rule("lock_before_id") /\ Rule("bound_before_id")
       THEN Goes(s, "id") /\ UNCHANGED seen
       ELSE Goes(s, "idle") /\ Reads(s, None)
    /\ UNCHANGED <<seq, daemon, wanted, row, saved, reservations>>

TakeNext(s) == \* nextval; at once where the transaction has its bound
    /\ seq < MaxId
    /\ seq' = seq + 1
    /\ \/ Idle(s) /\ setting[s] # None /\ UNCHANGED <<at, seen, setting>>
       \/ /\ at[s] = "id"
          /\ IF ~Rule("bound_before_id") THEN Reads(s, seq') /\ Goes(s, "lock") /\ UNCHANGED setting
             ELSE IF ~Rule("lock_before_id") THEN UNCHANGED <<seen, setting>> /\ Goes(s, "lock")
             ELSE /\ Reads(s, None) /\ Goes(s, "idle")
                  /\ setting' = IF Rule("guard_counts_from_own_id") THEN [setting EXCEPT ![s] = seq] ELSE setting
    /\ UNCHANGED <<daemon, wanted, lock, row, saved, reservations>>

(* ---- the guard ---- *)

Certified(id) == \* stream_certified: bounds up to the id that one session holds together with their certificate
    {b \in 0..id : \E s \in Sessions :
        b \in certified[s] /\ (b \in held[s] \/ ~Rule("certificate_needs_its_lock"))}

Insert(s, id) == \* any id that was given out, whosever it is
    /\ Idle(s) /\ id <= seq
    /\ IF ~Rule("guard") \/ (setting[s] # None /\ id > setting[s])
       THEN row' = [row EXCEPT ![s] = Min(@, id)] /\ UNCHANGED <<at, seen, wanted>>
       ELSE LET covered == Certified(id - 1)
                bound == IF setting[s] = None THEN id - 1 ELSE IF covered # {} THEN Greatest(covered) ELSE None IN
            /\ bound # None
            /\ Rule("lock_before_certificate") \/ covered # {}
            /\ Reads(s, bound) /\ Goes(s, "adopt") /\ wanted' = [wanted EXCEPT ![s] = id] /\ UNCHANGED row
    /\ UNCHANGED <<seq, daemon, lock, setting, saved, reservations>>

AdoptLock(s) == \* stream_adopt: a lock of this transaction's own
    /\ at[s] = "adopt"
    /\ lock' = [lock EXCEPT ![s] = Min(@, seen[s])]
    /\ Goes(s, "adopted")
    /\ UNCHANGED <<seq, daemon, seen, wanted, setting, row, saved, reservations>>

AdoptCheck(s) == \* and then a look whether the id is still covered; where it is not, RS003 aborts the transaction
    /\ at[s] = "adopted"
    /\ LET covered == Certified(wanted[s] - 1) IN
       /\ ~Rule("lock_before_certificate") \/ covered # {}
       /\ setting' = [setting EXCEPT ![s] = IF Rule("guard_counts_from_the_certificate") /\ covered # {}
                                            THEN Max(seen[s], Greatest(covered)) ELSE seen[s]]
    /\ row' = [row EXCEPT ![s] = Min(@, wanted[s])]
    /\ Goes(s, "idle") /\ Reads(s, None) /\ wanted' = [wanted EXCEPT ![s] = Free]
    /\ UNCHANGED <<seq, daemon, lock, saved, reservations>>

(* ---- the end of a transaction, and savepoints ---- *)

InTransaction(s) == lock[s] # Free \/ row[s] # Free \/ at[s] \in {"lock", "id", "adopt", "adopted"}

End(s) == \* commit, rollback or an error: its rows are visible or gone, its locks are released
    /\ InTransaction(s) /\ at[s] \in {"idle", "lock", "id", "adopt", "adopted"}
    /\ Goes(s, "idle") /\ Reads(s, None) /\ wanted' = [wanted EXCEPT ![s] = Free]
    /\ lock' = [lock EXCEPT ![s] = Free]
    /\ row' = [row EXCEPT ![s] = Free]
    /\ setting' = IF Rule("setting_names_its_transaction") THEN [setting EXCEPT ![s] = None] ELSE setting
    /\ saved' = [saved EXCEPT ![s] = <<>>]
    /\ UNCHANGED <<seq, daemon, reservations>>

Savepoint(s) ==
    /\ Savepoints /\ Idle(s) /\ saved[s] = <<>>
    /\ saved' = [saved EXCEPT ![s] = <<lock[s], setting[s], row[s]>>]
    /\ UNCHANGED <<seq, daemon, at, seen, wanted, lock, setting, row, reservations>>

RollbackTo(s) == \* releases the locks that were taken since; the program may keep the ids
    /\ Idle(s) /\ saved[s] # <<>>
    /\ lock' = [lock EXCEPT ![s] = saved[s][1]]
    /\ setting' = IF Rule("setting_reverts_with_the_lock") THEN [setting EXCEPT ![s] = saved[s][2]] ELSE setting
    /\ row' = [row EXCEPT ![s] = saved[s][3]]
    /\ saved' = [saved EXCEPT ![s] = <<>>]
    /\ UNCHANGED <<seq, daemon, at, seen, wanted, reservations>>

(* ---- stream_reserve, stream_complete: ids for the session ---- *)

BeginReserve(s) == \* reads the last value
    /\ Idle(s) /\ held[s] = {} /\ seq < MaxId
    /\ Reads(s, seq) /\ Goes(s, "reserve")
    /\ UNCHANGED <<seq, daemon, wanted, transactions, reservations>>

LockFirst(s) == \* locks what was read
    /\ at[s] = "reserve"
    /\ held' = [held EXCEPT ![s] = {seen[s]}]
    /\ IF Rule("hand_over_hand") THEN Goes(s, "again") /\ UNCHANGED certified
       ELSE Goes(s, "ids") /\ certified' = [certified EXCEPT ![s] = {seen[s]}]
    /\ UNCHANGED <<seq, daemon, seen, wanted, transactions>>

ReadAgain(s) == \* under that lock
    /\ at[s] = "again"
    /\ Reads(s, seq) /\ Goes(s, "bound")
    /\ UNCHANGED <<seq, daemon, wanted, transactions, reservations>>

LockBound(s) == \* locks the second value too, with a certificate
    /\ at[s] = "bound"
    /\ held' = [held EXCEPT ![s] = @ \union {seen[s]}]
    /\ certified' = [certified EXCEPT ![s] = {seen[s]}]
    /\ Goes(s, "ids")
    /\ UNCHANGED <<seq, daemon, seen, wanted, transactions>>

TakeReserved(s) == \* lets go of the first lock, then nextval; later ids of the session need only nextval
    /\ seq < MaxId
    /\ \/ at[s] = "ids" /\ held' = [held EXCEPT ![s] = {seen[s]}]
       \/ Idle(s) /\ certified[s] # {} /\ UNCHANGED held
    /\ seq' = seq + 1
    /\ Goes(s, "idle") /\ Reads(s, None)
    /\ UNCHANGED <<daemon, wanted, transactions, certified>>

MoveOn(s, next) == \* stream_complete with a next bound, first half: the bound of the ids still in flight
    /\ Idle(s) /\ certified[s] # {} /\ \A b \in held[s] : b < next
    /\ next <= seq
    /\ held' = [held EXCEPT ![s] = @ \union {next}]
    /\ certified' = [certified EXCEPT ![s] = @ \union {next}]
    /\ UNCHANGED <<seq, daemon, at, seen, wanted, transactions>>

Complete(s, b) == \* stream_complete, last half: the ids at its bound b are finished; one of the two locks goes first
    /\ Idle(s) /\ b \in certified[s]
    /\ \/ certified' = [certified EXCEPT ![s] = @ \ {b}] /\ UNCHANGED held
       \/ held' = [held EXCEPT ![s] = @ \ {b}] /\ UNCHANGED certified
    /\ Goes(s, "complete") /\ Reads(s, b)
    /\ UNCHANGED <<seq, daemon, wanted, transactions>>

Completed(s) == \* and the other afterwards
    /\ at[s] = "complete"
    /\ held' = [held EXCEPT ![s] = @ \ {seen[s]}] /\ certified' = [certified EXCEPT ![s] = @ \ {seen[s]}]
    /\ Goes(s, "idle") /\ Reads(s, None)
    /\ UNCHANGED <<seq, daemon, wanted, transactions>>

Die(s) == \* the session ends wherever it is
    /\ held[s] # {} /\ at[s] # "dying"
    /\ Goes(s, "dying") /\ Reads(s, None)
    /\ UNCHANGED <<seq, daemon, wanted, transactions, reservations>>

LetGo(s, b) == \* Postgres releases its locks one after the other, in any order; then another session takes its place
    /\ at[s] = "dying"
    /\ \/ b \in certified[s] /\ certified' = [certified EXCEPT ![s] = @ \ {b}] /\ UNCHANGED held
       \/ b \in held[s] /\ held' = [held EXCEPT ![s] = @ \ {b}] /\ UNCHANGED certified
    /\ Goes(s, IF held'[s] = {} /\ certified'[s] = {} THEN "idle" ELSE "dying")
    /\ UNCHANGED <<seq, daemon, seen, wanted, transactions>>

Inserting(s) ==
    \/ BeginNext(s) \/ LockNext(s) \/ TakeNext(s) \/ End(s) \/ Savepoint(s) \/ RollbackTo(s)
    \/ AdoptLock(s) \/ AdoptCheck(s) \/ \E id \in 1..MaxId : Insert(s, id)

Reserving(s) ==
    \/ BeginReserve(s) \/ LockFirst(s) \/ ReadAgain(s) \/ LockBound(s) \/ TakeReserved(s) \/ Completed(s) \/ Die(s)
    \/ \E b \in 0..MaxId : MoveOn(s, b) \/ Complete(s, b) \/ LetGo(s, b)

(* ---- a poll ---- *)

Lowest == Least({lock[s] : s \in Sessions} \union UNION {held[s] : s \in Sessions})

ReadLast ==
    /\ step = "value"
    /\ reading' = seq
    /\ IF Rule("last_value_before_locks") THEN step' = "locks" /\ UNCHANGED <<position, listed>>
       ELSE /\ step' = "locks" /\ position' = Max(position, Min(seq, listed)) /\ listed' = Free
    /\ UNCHANGED <<seq, at, seen, wanted, transactions, reservations>>

ListLocks == \* and publishes: a position never falls; the locks may be listed again for the same last value
    /\ step = "locks"
    /\ IF Rule("last_value_before_locks")
       THEN /\ position' = Max(position, Min(reading, Lowest)) /\ UNCHANGED listed
            /\ (step' = "value" /\ reading' = None) \/ (step' = "locks" /\ UNCHANGED reading)
       ELSE step' = "value" /\ listed' = Lowest /\ UNCHANGED <<position, reading>>
    /\ UNCHANGED <<seq, at, seen, wanted, transactions, reservations>>

Next == (\E s \in Inserters : Inserting(s)) \/ (\E s \in Reservers : Reserving(s)) \/ ReadLast \/ ListLocks
Spec == Init /\ [][Next]_vars

(* ---- what must hold ---- *)

(* No transaction has a row in the table, not committed yet, at or below the position. *)
NoLateRow == \A s \in Sessions : row[s] > position

(* While a certificate and its lock are held, nothing above their bound was published. *)
CertificatesAreTrue == \A s \in Sessions : \A b \in held[s] \intersect certified[s] : position <= b

Symmetry == Permutations(Inserters) \union Permutations(Reservers)
=============================================================================
