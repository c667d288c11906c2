-------------------------------- MODULE Leases --------------------------------
(* The lease of one partition of a tube, as in docs/leases.md: workers that claim, renew, work, ack and release; a daemon
   for each of them that watches the beat; and delays everywhere. docs/dev/specs.md explains the model and names the code of
   each action.

   Time goes in ticks. A worker or daemon that is paused takes no step while ticks pass. Terms and beats are numbers that
   are never given twice. All that is ever asked of them is whether they are those of the present lease; so the model
   keeps that answer instead of the number, and needs no bound on how often leases are claimed and renewed.

   Assumed of Postgres, each with a test that docs/positions.md names under "Assumptions":
   rows_are_seen_anew, acted_upon_is_kept.

   `Off` is the set of rules that are switched off: {} in all_rules_*.cfg, one rule in every without_*.cfg. *)
EXTENDS Integers, TLC

CONSTANTS
    Workers,      \* each is served by a daemon of its own
    Ttl,          \* time to live of a lease, in ticks
    Gap,          \* the most ticks that count between two looks of a daemon
    Outages,      \* how often Postgres is away
    Calls, Acks,  \* whether the user's function and acks are looked at
    Off           \* the rules that are switched off

Rule(name) == name \notin Off
NoRequest == [kind |-> "none", age |-> 0, term |-> "none", answer |-> "none"]
Unseen == -1      \* the present beat was not seen yet
Mistaken == -2    \* only without a rule: another beat had expired, and this one counts as if it had

VARIABLES
    holder,       \* in the row of tube_lease; "nobody": there is no row
    term,         \* of each worker: none, present (that of the row), old
    left,         \* ticks until its deadline
    busy,         \* whether a call of the user's function is under way
    request,      \* its CLAIM or RENEW on the way: ticks since it was sent, its term, and the answer once there is one
    ack,          \* its ACK on the way: none, sent, held (its transaction holds the row)
    ackTerm,      \* and the term in it
    silent,       \* for how many ticks its daemon has seen the present beat unchanged
    since,        \* ticks since the daemon's last look
    away,         \* whether Postgres is away
    outages,      \* how often it may still go
    chance,       \* ticks since the present beat in which a renewal was possible (only where there are outages)
    staleAck,     \* whether an ack has removed pods after its lease was replaced
    robbed        \* whether a lease was replaced that its holder had hardly a chance to renew

verdicts == <<staleAck, robbed>>
worker == <<term, left, busy, request, ack, ackTerm>>
watch == <<silent, since>>
weather == <<away, outages>>
vars == <<holder, chance, verdicts, worker, watch, weather>>

Min(a, b) == IF a <= b THEN a ELSE b
All(value) == [w \in Workers |-> value]

Init ==
    /\ holder = "nobody" /\ staleAck = FALSE /\ robbed = FALSE
    /\ term = All("none") /\ left = All(0) /\ busy = All(FALSE) /\ request = All(NoRequest)
    /\ ack = All("none") /\ ackTerm = All("none")
    /\ silent = All(Unseen) /\ since = All(0)
    /\ away = FALSE /\ outages = Outages /\ chance = 0

Trusts(w) == term[w] # "none" /\ (left[w] > 0 \/ ~Rule("stop_at_the_deadline"))

(* ---- a worker ---- *)

Stops(w) == \* it gives up its lease and cancels its calls
    /\ term' = [term EXCEPT ![w] = "none"] /\ left' = [left EXCEPT ![w] = 0] /\ busy' = [busy EXCEPT ![w] = FALSE]

Ask(w, kind) ==
    /\ request[w].kind = "none"
    /\ request' = [request EXCEPT ![w] = [kind |-> kind, age |-> 0, term |-> term[w], answer |-> "none"]]
    /\ UNCHANGED <<holder, chance, verdicts, term, left, busy, ack, ackTerm, watch, weather>>

AskClaim(w) == term[w] = "none" /\ ~busy[w] /\ Ask(w, "claim")
AskRenew(w) == term[w] # "none" /\ Ask(w, "renew")   \* also before it trusts the lease: see Hear

Hear(w) == \* the answer arrives; the deadline counts from the moment at which the request was sent. A lease that a CLAIM
           \* gave too late is not trusted yet: the worker has its term, and sends RENEW first.
    LET r == request[w]
        window == IF Rule("count_from_the_request") THEN Ttl - r.age ELSE Ttl
    IN  /\ r.answer # "none"
        /\ request' = [request EXCEPT ![w] = NoRequest]
        /\ IF r.answer = "refused" THEN Stops(w)
           ELSE IF r.kind = "claim" \/ (window > 0 /\ term[w] # "none")
           THEN term' = [term EXCEPT ![w] = r.term] /\ left' = [left EXCEPT ![w] = window] /\ UNCHANGED busy
           ELSE UNCHANGED <<term, left, busy>>
        /\ UNCHANGED <<holder, chance, verdicts, ack, ackTerm, watch, weather>>

Call(w) == \* the user's function begins
    /\ Calls /\ Trusts(w) /\ ~busy[w]
    /\ busy' = [busy EXCEPT ![w] = TRUE]
    /\ UNCHANGED <<holder, chance, verdicts, term, left, request, ack, ackTerm, watch, weather>>

Return(w) == \* and ends
    /\ busy[w]
    /\ busy' = [busy EXCEPT ![w] = FALSE]
    /\ left' = IF term[w] = "none" THEN [left EXCEPT ![w] = 0] ELSE left
    /\ UNCHANGED <<holder, chance, verdicts, term, request, ack, ackTerm, watch, weather>>

SendAck(w) ==
    /\ Acks /\ Trusts(w) /\ ack[w] = "none"
    /\ ack' = [ack EXCEPT ![w] = "sent"] /\ ackTerm' = [ackTerm EXCEPT ![w] = term[w]]
    /\ UNCHANGED <<holder, chance, verdicts, term, left, busy, request, watch, weather>>

Die(w) == \* killed; a new process of the same name takes its place
    /\ term[w] # "none" \/ request[w].kind # "none" \/ busy[w]
    /\ Stops(w)
    /\ request' = [request EXCEPT ![w] = NoRequest]
    /\ UNCHANGED <<holder, chance, verdicts, ack, ackTerm, watch, weather>>

(* ---- Postgres ---- *)

IsPresent(t) == holder # "nobody" /\ (t = "present" \/ ~Rule("statements_name_the_term"))
Held == Rule("ack_locks_the_lease") /\ \E v \in Workers : ack[v] = "held"
Aged(t) == IF t = "present" THEN "old" ELSE t

NewBeat == \* the holder gave a sign of life: what the daemons saw is not the present beat any more
    /\ silent' = [w \in Workers |-> IF ~Rule("only_the_beat_that_was_watched") /\ silent[w] = Ttl THEN Mistaken
                                    ELSE IF ~Rule("beats_are_never_reused") THEN silent[w] ELSE Unseen]
    /\ since' = since
    /\ chance' = 0

Claim(w) == \* tube_lease_claim; removing another's lease waits for an ack that holds its row
    LET expired == silent[w] \in {Ttl, Mistaken}
        mine == holder = w
        replaces == ~mine /\ (holder = "nobody" \/ expired)
        ages == replaces /\ Rule("every_lease_has_a_term_of_its_own")
        answered == [request EXCEPT ![w] = IF mine \/ replaces THEN [@ EXCEPT !.term = "present", !.answer = "given"]
                                           ELSE NoRequest]
    IN  /\ ~away /\ request[w].kind = "claim" /\ request[w].answer = "none"
        /\ replaces /\ holder # "nobody" => ~Held
        /\ IF mine \/ replaces
           THEN /\ holder' = w /\ NewBeat
                /\ robbed' = (robbed \/ (Outages > 0 /\ replaces /\ holder # "nobody" /\ chance < Ttl - Gap))
           ELSE UNCHANGED <<holder, watch, chance, robbed>>
        /\ request' = [v \in Workers |-> IF v = w \/ ~ages THEN answered[v] ELSE [request[v] EXCEPT !.term = Aged(@)]]
        /\ term' = IF ages THEN [v \in Workers |-> Aged(term[v])] ELSE term
        /\ ackTerm' = IF ages THEN [v \in Workers |-> Aged(ackTerm[v])] ELSE ackTerm
        /\ UNCHANGED <<staleAck, left, busy, ack, weather>>

Renew(w) == \* tube_lease_renew
    /\ ~away /\ request[w].kind = "renew" /\ request[w].answer = "none"
    /\ IF IsPresent(request[w].term)
       THEN NewBeat /\ request' = [request EXCEPT ![w].answer = "given"]
       ELSE UNCHANGED <<watch, chance>> /\ request' = [request EXCEPT ![w].answer = "refused"]
    /\ UNCHANGED <<holder, verdicts, term, left, busy, ack, ackTerm, weather>>

Release(w) == \* tube_lease_release; not while a call is under way, which may take effect although it is cancelled
    /\ ~away /\ Trusts(w) /\ (~busy[w] \/ ~Rule("release_only_when_idle"))
    /\ IF term[w] = "present" /\ holder # "nobody"
       THEN /\ ~Held /\ holder' = "nobody" /\ silent' = All(Unseen)
            /\ request' = [v \in Workers |-> [request[v] EXCEPT !.term = Aged(@)]]
            /\ ackTerm' = [v \in Workers |-> Aged(ackTerm[v])]
       ELSE UNCHANGED <<holder, silent, request, ackTerm>>
    /\ term' = [v \in Workers |-> IF v = w THEN "none" ELSE IF holder' # holder THEN Aged(term[v]) ELSE term[v]]
    /\ left' = IF busy[w] THEN left ELSE [left EXCEPT ![w] = 0]
    /\ UNCHANGED <<chance, verdicts, busy, ack, since, weather>>

AckHold(w) == \* tube_ack, its first half: tube_lease_hold
    /\ ~away /\ ack[w] = "sent"
    /\ ack' = [ack EXCEPT ![w] = IF IsPresent(ackTerm[w]) THEN "held" ELSE "none"]
    /\ ackTerm' = IF ack'[w] = "held" THEN ackTerm ELSE [ackTerm EXCEPT ![w] = "none"]
    /\ UNCHANGED <<holder, chance, verdicts, term, left, busy, request, watch, weather>>

AckRemove(w) == \* its second half, and the commit: the pods are removed
    /\ ack[w] = "held"
    /\ staleAck' = (staleAck \/ ackTerm[w] = "old" \/ holder # w)
    /\ ack' = [ack EXCEPT ![w] = "none"] /\ ackTerm' = [ackTerm EXCEPT ![w] = "none"]
    /\ UNCHANGED <<holder, chance, robbed, term, left, busy, request, watch, weather>>

(* ---- the daemon of a worker ---- *)

Look(w) == \* reads the beat; adds up for how long it is unchanged
    /\ ~away /\ holder # "nobody"
    /\ LET first == IF Rule("new_beats_get_a_whole_ttl") THEN 0 ELSE Ttl IN
       silent' = [silent EXCEPT ![w] = IF @ \in {Unseen, Mistaken} THEN first ELSE Min(Ttl, @ + since[w])]
    /\ since' = [since EXCEPT ![w] = 0]
    /\ UNCHANGED <<holder, chance, verdicts, worker, weather>>

Restart(w) == \* it begins anew
    /\ silent[w] # Unseen
    /\ silent' = [silent EXCEPT ![w] = Unseen] /\ since' = [since EXCEPT ![w] = 0]
    /\ UNCHANGED <<holder, chance, verdicts, worker, weather>>

(* ---- time, and Postgres away ---- *)

Fall == \* Postgres goes away; the transactions in it are undone
    /\ ~away /\ outages > 0 /\ away' = TRUE /\ outages' = outages - 1
    /\ ack' = [w \in Workers |-> IF ack[w] = "held" THEN "none" ELSE ack[w]]
    /\ ackTerm' = [w \in Workers |-> IF ack[w] = "held" THEN "none" ELSE ackTerm[w]]
    /\ UNCHANGED <<holder, chance, verdicts, term, left, busy, request, watch>>

Rise ==
    /\ away /\ away' = FALSE
    /\ UNCHANGED <<holder, chance, verdicts, worker, watch, outages>>

Tick == \* all clocks run at one speed
    \E slow \in IF Rule("clocks_of_one_speed") THEN {{}} ELSE {{}} \union {{w} : w \in Workers} :
    LET rest == [w \in Workers |-> IF w \in slow \/ left[w] = 0 THEN left[w] ELSE left[w] - 1]
        over(w) == left[w] > 0 /\ rest[w] = 0 /\ Rule("stop_at_the_deadline")
        most == IF Rule("long_gaps_count_little") THEN Gap ELSE Ttl
    IN  /\ left' = rest
        /\ term' = [w \in Workers |-> IF over(w) THEN "none" ELSE term[w]]
        /\ busy' = [w \in Workers |-> busy[w] /\ ~over(w)]
        /\ request' = [w \in Workers |-> IF request[w].kind = "none" \/ w \in slow THEN request[w]
                                         ELSE [request[w] EXCEPT !.age = Min(Ttl, @ + 1)]]
        /\ since' = [w \in Workers |-> IF silent[w] < 0 THEN 0 ELSE Min(since[w] + 1, most)]
        /\ chance' = IF away \/ Outages = 0 THEN chance ELSE Min(Ttl, chance + 1)
        /\ UNCHANGED <<holder, verdicts, ack, ackTerm, silent, weather>>

Next ==
    \/ Tick \/ Fall \/ Rise
    \/ \E w \in Workers :
        \/ AskClaim(w) \/ AskRenew(w) \/ Hear(w) \/ Call(w) \/ Return(w) \/ SendAck(w) \/ Die(w)
        \/ Claim(w) \/ Renew(w) \/ Release(w) \/ AckHold(w) \/ AckRemove(w) \/ Look(w) \/ Restart(w)
Spec == Init /\ [][Next]_vars

(* ---- what must hold ---- *)

(* At most one worker trusts its lease, and calls of the user's function run in one worker only. *)
OneWorker == \A v, w \in Workers : v # w => ~(Trusts(v) /\ Trusts(w)) /\ ~(busy[v] /\ busy[w])

(* No ack removes pods after its worker's lease was replaced. *)
NoStaleAck == ~staleAck

(* A lease is replaced only when its holder could have renewed it for its time to live, but for one gap. *)
NoRobbery == ~robbed

Symmetry == Permutations(Workers)
===============================================================================
