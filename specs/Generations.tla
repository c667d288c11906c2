----------------------------- MODULE Generations -----------------------------
(* The generations of docs/positions.md: what a client's token means after the history of a stream has forked. One
   stream in linear order, servers that are restored, promoted and exchanged, daemons, and a client that resumes.
   docs/dev/specs.md explains the model and names the code of each action.

   Rows are numbers that are never used twice, so that a row with the id of an earlier one can be told from it. Writers
   commit in the order of their ids here: LockWatch.tla is about the other half of the problem.

   Assumed of Postgres, each with a test that docs/positions.md names under "Assumptions":
   one_history, files_show_restarts, restored_tables_are_others, first_id_is_logged, crashes_show.

   `Off` is the set of rules that are switched off: {} in all_rules_*.cfg, one rule in every without_*.cfg. *)
EXTENDS Integers, Sequences, TLC

CONSTANTS
    Daemons,
    MaxRows,      \* how many rows are written at most
    MaxEvents,    \* how many restores, promotions and so on there are at most
    Ahead,        \* how many ids Postgres logs ahead of those that it has given out
    Off           \* the rules that are switched off

Rule(name) == name \notin Off
Nowhere == "nowhere"
Nothing == -1
Unbounded == (MaxRows + 1) * (Ahead + 1)

VARIABLES
    db,           \* the server at the address: see Init
    old,          \* the one that was there before it, and may come back; <<>>: none
    saved,        \* a backup, a dump, or a standby that lags
    written,      \* rows written so far
    events,       \* restores, promotions and so on so far
    fresh,        \* the last number given to a server, an oid, a file or a generation

    list,         \* the list of generations as each daemon read it last; it serves the last one
    server,       \* the server on which it read the list
    oids,         \* and the oids that it found there
    value,        \* the last value that its poll has read, until it is published
    position,     \* what it has published
    copy,         \* rows that it has read for the client and not sent yet; <<>>: none
    back,         \* a position to which it sets the client back, while the messages for that are being sent

    at,           \* the daemon at which the client reads, or Nowhere
    epoch,        \* the generation in the client's token
    have          \* its rows by id; 0 where it was told of a position and got no row. Its token is <<epoch, Len(have)>>

daemon == <<list, server, oids, value, position, copy, back>>
client == <<at, epoch, have>>
vars == <<db, old, saved, written, events, fresh, daemon, client>>

Min(a, b) == IF a <= b THEN a ELSE b
Max(a, b) == IF a >= b THEN a ELSE b
Last(s) == s[Len(s)]
Cut(s, n) == SubSeq(s, 1, Min(n, Len(s)))
Put(f, d, v) == [f EXCEPT ![d] = v]

Init ==
    LET first == [id |-> 0, began |-> 0, server |-> 0, oids |-> 0, file |-> 0] IN
    /\ db = [rows |-> <<>>, generations |-> <<first>>, noted |-> 0, server |-> 0, oids |-> 0, file |-> 0,
             ahead |-> 0]  \* how far the sequence shows more than was given out: after a promotion, until an id is taken
    /\ old = <<>> /\ saved = db
    /\ written = 0 /\ events = 0 /\ fresh = 0
    /\ list = [d \in Daemons |-> <<first>>] /\ server = [d \in Daemons |-> 0] /\ oids = [d \in Daemons |-> 0]
    /\ value = [d \in Daemons |-> Nothing] /\ position = [d \in Daemons |-> 0]
    /\ copy = [d \in Daemons |-> <<>>] /\ back = [d \in Daemons |-> Nothing]
    /\ at = Nowhere /\ epoch = 0 /\ have = <<>>

(* ---- what happens to the database ---- *)

(* The sequence has begun again since the last generation: with the same oid it has another file. *)
OtherFile(s) == LET g == Last(s.generations) IN s.oids = g.oids /\ s.file # g.file

Write ==
    /\ written < MaxRows /\ written' = written + 1
    /\ db' = [db EXCEPT !.rows = Append(@ \o [i \in 1..db.ahead |-> 0], written'), !.ahead = 0]
    /\ UNCHANGED <<old, saved, events, fresh, daemon, client>>

Save == \* a dump or a copy of the data folder is made, or the standby catches up
    /\ saved # db /\ events < MaxEvents
    /\ saved' = db
    /\ UNCHANGED <<db, old, written, events, fresh, daemon, client>>

Happens == events < MaxEvents /\ events' = events + 1

Promote == \* a standby, a cold copy or this server itself, started again: another server with all that was saved
    /\ Happens /\ fresh' = fresh + 1
    /\ \E n \in 0..Ahead : db' = [saved EXCEPT !.server = fresh', !.ahead = n]
    /\ old' = db
    /\ UNCHANGED <<saved, written, daemon, client>>

Restore == \* a dump into the live database: other oids on the same server
    /\ Happens /\ fresh' = fresh + 1
    /\ Rule("look_between_truncate_and_dump") => ~OtherFile(saved)
    /\ db' = [saved EXCEPT !.server = db.server, !.oids = fresh', !.file = fresh', !.ahead = 0]
    /\ UNCHANGED <<old, saved, written, daemon, client>>

FailBack == \* the address leads to the earlier server again, which was running all the time
    /\ Happens /\ old # <<>>
    /\ db' = old /\ old' = db
    /\ UNCHANGED <<saved, written, fresh, daemon, client>>

Truncate == \* TRUNCATE ... RESTART IDENTITY and inserts, in one transaction
    /\ Happens /\ fresh' = fresh + 1
    /\ Rule("look_between_truncate_and_dump") => db.oids = Last(db.generations).oids
    /\ \E n \in 0..2 :
        /\ written + n <= MaxRows /\ written' = written + n
        /\ db' = [db EXCEPT !.rows = [i \in 1..n |-> written + i], !.file = fresh', !.ahead = 0]
    /\ UNCHANGED <<old, saved, daemon, client>>

(* ---- the list of generations ---- *)

(* What is shared by all generations after the one with this id; Nothing: it is not in the list. *)
Shared(generations, id) ==
    LET places == {i \in 1..Len(generations) : generations[i].id = id}
    IN  IF places = {} THEN Nothing
        ELSE LET later == {i \in 1..Len(generations) : \A place \in places : i > place}
                 began == IF Rule("lowest_of_all_later_generations") THEN {generations[i].began : i \in later}
                          ELSE IF later = {} THEN {} ELSE {Last(generations).began}
             IN  IF began = {} THEN Unbounded ELSE CHOOSE b \in began : \A c \in began : b <= c

OtherPlace(s) ==
    LET g == Last(s.generations) IN
    \/ s.server # g.server /\ Rule("server_is_compared")
    \/ s.oids # g.oids /\ Rule("oids_are_compared")

Forked == \* the database as the look leaves it: with a new generation where continuity is not proven
    LET floor == OtherFile(db) /\ Rule("file_is_compared")
        begins == IF floor THEN 0 ELSE IF Rule("fork_at_the_noted_position") THEN db.noted ELSE Len(db.rows)
        id == IF Rule("generations_are_random") THEN fresh + 1 ELSE Len(db.generations)
        new == [id |-> id, began |-> begins, server |-> db.server, oids |-> db.oids, file |-> db.file]
    IN  IF floor \/ OtherPlace(db)
        THEN [db EXCEPT !.generations = Append(@, new),
                        !.noted = IF Rule("fork_lowers_the_note") THEN begins ELSE @]
        ELSE db

(* ---- a daemon ---- *)

Look(d) == \* at the registry: on a new connection and each second; forks where it must, and adopts what it finds
    LET mine == Last(list[d]).id
        found == Forked.generations
        shared == IF Shared(found, mine) = Nothing THEN 0 ELSE Shared(found, mine)
        moved == mine # Last(found).id
    IN  /\ copy[d] = <<>> \/ ~Rule("copy_ends_before_the_adoption")
        /\ back[d] = Nothing
        /\ db' = Forked /\ fresh' = IF Forked # db THEN fresh + 1 ELSE fresh
        /\ list' = Put(list, d, found) /\ server' = Put(server, d, db.server) /\ oids' = Put(oids, d, db.oids)
        /\ <<db', list', server', oids'>> # <<db, list, server, oids>>
        /\ IF moved
           THEN /\ position' = Put(position, d, Min(position[d], shared))
                /\ value' = IF Rule("adoption_drops_the_poll") THEN Put(value, d, Nothing) ELSE value
           ELSE UNCHANGED <<position, value>>
        /\ IF moved /\ at = d
           THEN /\ back' = Put(back, d, shared)
                /\ IF Rule("set_back_before_the_epoch") THEN have' = Cut(have, shared) /\ UNCHANGED epoch
                   ELSE epoch' = Last(found).id /\ UNCHANGED have
           ELSE UNCHANGED <<back, epoch, have>>
        /\ UNCHANGED <<old, saved, written, events, copy, at>>

Announced(d) == \* the client got all messages of an adoption: first POSITIONs that go back, then WRITERS with the epoch
    /\ back[d] # Nothing
    /\ back' = Put(back, d, Nothing)
    /\ IF Rule("set_back_before_the_epoch") THEN epoch' = Last(list[d]).id /\ UNCHANGED have
       ELSE have' = Cut(have, back[d]) /\ UNCHANGED epoch
    /\ UNCHANGED <<db, old, saved, written, events, fresh, list, server, oids, value, position, copy, at>>

Reconnect(d) == \* only without the rule: reading goes on at the new server before a look at the registry
    /\ ~Rule("look_before_reading") /\ server[d] # db.server
    /\ server' = Put(server, d, db.server) /\ oids' = Put(oids, d, db.oids)
    /\ UNCHANGED <<db, old, saved, written, events, fresh, list, value, position, copy, back, client>>

(* The servers that the daemon's connections may lead to. *)
Within(d) ==
    LET all == {db} \union (IF old = <<>> THEN {} ELSE {old})
    IN  IF Rule("one_server_for_all_connections") THEN {s \in all : s.server = server[d]} ELSE all

(* What a poll takes for the last value. The logged value does not count before an id was taken in this run. *)
Counts(s) == Len(s.rows) + IF Rule("only_taken_ids_count") THEN 0 ELSE s.ahead

Poll(d) == \* reads the last value; the sequence is named by its oid
    /\ value[d] = Nothing /\ back[d] = Nothing
    /\ \E s \in Within(d) :
        /\ s.oids = oids[d] /\ Counts(s) > position[d]
        /\ value' = Put(value, d, Counts(s))
    /\ UNCHANGED <<db, old, saved, written, events, fresh, list, server, oids, position, copy, back, client>>

Publish(d) ==
    /\ value[d] # Nothing
    /\ position' = Put(position, d, Max(position[d], value[d])) /\ value' = Put(value, d, Nothing)
    /\ UNCHANGED <<db, old, saved, written, events, fresh, list, server, oids, copy, back, client>>

Note(d) == \* stream_note: checked by the server on which it runs
    \E s \in Within(d) :
        LET present == Last(s.generations)
            fits == /\ present.id = Last(list[d]).id \/ ~Rule("note_names_its_generation")
                    /\ (present.server = s.server /\ present.oids = s.oids /\ present.file = s.file)
                       \/ ~Rule("note_checks_the_server")
        IN  /\ fits /\ s.noted < position[d]
            /\ IF s = db THEN db' = [db EXCEPT !.noted = position[d]] /\ UNCHANGED old
               ELSE old' = [old EXCEPT !.noted = position[d]] /\ UNCHANGED db
            /\ UNCHANGED <<saved, written, events, fresh, daemon, client>>

Copy(d) == \* reads the rows up to the position for the client; the statement checks that the table is the same
    /\ at = d /\ copy[d] = <<>> /\ back[d] = Nothing /\ Len(have) < position[d]
    /\ \E s \in Within(d) :
        /\ s.oids = oids[d]
        /\ s.file = Last(list[d]).file \/ s.oids # Last(list[d]).oids \/ ~Rule("copy_checks_the_file")
        /\ copy' = Put(copy, d, [i \in 1..(position[d] - Len(have)) |->
                                 IF i + Len(have) <= Len(s.rows) THEN s.rows[i + Len(have)] ELSE 0])
    /\ UNCHANGED <<db, old, saved, written, events, fresh, list, server, oids, value, position, back, client>>

Send(d) ==
    /\ copy[d] # <<>> /\ at = d
    /\ have' = have \o copy[d] /\ copy' = Put(copy, d, <<>>)
    /\ UNCHANGED <<db, old, saved, written, events, fresh, list, server, oids, value, position, back, at, epoch>>

(* ---- the client ---- *)

Leave == \* its connection breaks; its token and its rows stay
    /\ at # Nowhere
    /\ copy' = Put(copy, at, <<>>) /\ back' = Put(back, at, Nothing) /\ at' = Nowhere
    /\ UNCHANGED <<db, old, saved, written, events, fresh, list, server, oids, value, position, epoch, have>>

Resume(d) == \* REPLICATE with its token; where the token is refused, the client does what it is told
    LET shared == Shared(list[d], epoch) IN
    /\ at = Nowhere
    /\ epoch' = Last(list[d]).id
    /\ IF shared = Nothing
       THEN IF Rule("unknown_generations_begin_again") THEN have' = <<>> /\ at' = Nowhere ELSE UNCHANGED have /\ at' = d
       ELSE IF Len(have) > shared /\ Rule("tokens_above_the_fork_are_refused")
       THEN have' = Cut(have, shared) /\ at' = Nowhere
       ELSE UNCHANGED have /\ at' = d
    /\ UNCHANGED <<db, old, saved, written, events, fresh, daemon>>

Next ==
    \/ Write \/ Save \/ Promote \/ Restore \/ FailBack \/ Truncate \/ Leave
    \/ \E d \in Daemons :
        Look(d) \/ Announced(d) \/ Reconnect(d) \/ Poll(d) \/ Publish(d) \/ Note(d) \/ Copy(d) \/ Send(d) \/ Resume(d)
Spec == Init /\ [][Next]_vars

(* ---- what must hold ---- *)

(* The position up to which the present history is that of generation `id`, forks that nobody has recorded yet included. *)
Common(id) ==
    LET g == Last(db.generations)
        shared == Shared(db.generations, id)
    IN  IF OtherFile(db) THEN 0
        ELSE IF g.server # db.server \/ g.oids # db.oids THEN Min(shared, db.noted) ELSE shared

(* As far as the client's generation is shared with the present history, its rows are those of the table: none is
   missing and none is another. For the present generation this is all that it has. *)
TokenIsTrue ==
    LET n == Min(Len(have), Common(epoch)) IN
    n <= Len(db.rows) /\ \A i \in 1..n : have[i] = db.rows[i]

(* The noted position is never ahead of the rows, once a daemon has seen that the ids began again. *)
NoteIsTrue == OtherFile(db) \/ db.noted <= Len(db.rows)

(* A client that reads at a daemon which has looked at the database as it is has a prefix of the table, and nothing else. *)
AfterALook ==
    \A d \in Daemons :
        (at = d /\ back[d] = Nothing /\ epoch = Last(list[d]).id /\ list[d] = db.generations /\ server[d] = db.server
            /\ oids[d] = db.oids /\ ~OtherFile(db))
        => Len(have) <= Len(db.rows) /\ \A i \in 1..Len(have) : have[i] = db.rows[i]

Symmetry == Permutations(Daemons)
===============================================================================
