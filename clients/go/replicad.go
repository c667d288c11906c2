// A client of replicad in Go 1.19 and newer: one file, the standard library only. See protocol.md.
//
//	err := Follow(ctx, "127.0.0.1:9009", "events", Options{Token: "EARLIEST"}, func(event Event) error {
//		if event.Reset {
//			return discard(event.Instance, event.Above) // history forked, or rows expired
//		}
//		return save(event.Rows, event.Token) // together, in one transaction
//	})
//	err = Work(ctx, "127.0.0.1:9009", "cities", Options{}, func(ctx context.Context, pod Pod) error { return index(pod.IDs) })
//
// An address may name several daemons, host1:9009,host2:9009: the first that answers is used. To use the file in a
// program, copy it and change the name of its package. main.go is such a program.
package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"regexp"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	pingEvery    = 4 * time.Second        // protocol.md wants a command every 5 s
	silent       = 15 * time.Second       // without a line: the server is given up
	connectLimit = 5 * time.Second        // for a connection, TLS and SERVER
	connectOne   = 800 * time.Millisecond // the same where another address could answer instead
	maxLine      = 64 << 20               // bytes; the longest row that a server sends by default
	maxBatchRows = 1_000_000              // of one token
	maxBatch     = 1 << 28                // bytes of these rows
	firstPause   = 100 * time.Millisecond // before the next try, which doubles up to maxPause
	maxPause     = 5 * time.Second
	refusalLimit = 8 // in a row of a token that is ahead: the daemon may lag behind the one before
)

// Options of Follow and Work. The zero value is usable.
type Options struct {
	Token     string      // where to begin: NOW (the default), EARLIEST, or a token that was kept
	Secret    string      // for AUTH
	Name      string      // in the daemon's lists
	TLS       *tls.Config // connect with TLS
	Partition string      // of Work: 0/4 is the first of four; 0/1, the default, is the whole tube
	TTL       int         // of Work: seconds of the lease; 30
	Limit     int         // of Work: pods in one answer; 100
	Tries     int         // of Work: of a pod that fails, before it is parked; 5

	OnDisconnect func(err error, retryIn time.Duration)
}

// Event is rows with one token, or, with Reset, what to discard: the rows of Instance ("": of all writers) above Above
// (nil: all rows). Token is where to go on after it; keep it together with the effect of the rows.
type Event struct {
	Stream, Instance, Token, Reason string
	At                              int64
	Rows                            []json.RawMessage
	Reset                           bool
	Above                           *int64
}

// Pod is an entry of a tube. The ids are numbers (json.Number), or strings where the keys of the tube are texts.
type Pod struct {
	Seq     int64           `json:"seq"`
	Op      string          `json:"op"`
	Shard   int             `json:"shard"`
	IDs     []any           `json:"ids"`
	TS      string          `json:"ts"`
	Payload json.RawMessage `json:"payload"`
}

// Error is an ERROR of the server, or has the code `protocol` (the server breaks the protocol), or none: the connection
// is lost or could not be made.
type Error struct{ Code, Sentence string }

func (e *Error) Error() string { return strings.TrimPrefix(e.Code+": "+e.Sentence, ": ") }

func lost(form string, values ...any) error { return &Error{"", fmt.Sprintf(form, values...)} }

var (
	coded   = regexp.MustCompile(`(?s)^([a-z_]+): (.*)$`)
	passing = regexp.MustCompile(`^($|database|row_|stream_refused|token_ahead|slow_reader|tube_refused|partitions_changed|too_many)`)
	resume  = regexp.MustCompile(` resume from (\S+)$`)
	vectors = regexp.MustCompile(`^(?:([0-9a-f]{8,32})!)?(-?\d{1,19})((?:~\d{1,9}\.-?\d{1,19})*)$`)
	breaks  = regexp.MustCompile("[\\x00-\\x1f\\x7f-\u009f]+")
)

func refusal(text string) error {
	if found := coded.FindStringSubmatch(text); found != nil {
		return &Error{found[1], found[2]}
	}
	return lost("the server sent ERROR %s", text)
}

// code returns the code of an ERROR; a blank for any other error than Error.
func code(err error) string {
	if found, ok := err.(*Error); ok {
		return found.Code
	}
	return " "
}

// or returns the first of two values that is not the zero value.
func or[T comparable](value, other T) T {
	var zero T
	if value == zero {
		return other
	}
	return value
}

// connection is one connection, in lines. It sends PINGs, and ends when the server is silent.
type connection struct {
	net.Conn
	address string
	lines   chan string // closed at the end; err has the reason
	err     error
	done    chan struct{}
	once    sync.Once
}

func (c *connection) read() {
	defer close(c.lines)
	scanner := bufio.NewScanner(c)
	scanner.Buffer(make([]byte, 1<<16), maxLine)
	scanner.Split(func(data []byte, _ bool) (int, []byte, error) { // a line without its end is none
		end := bytes.IndexByte(data, '\n')
		if end < 0 {
			return 0, nil, nil
		}
		return end + 1, bytes.TrimSuffix(data[:end], []byte("\r")), nil
	})
	for scanner.Scan() {
		line := scanner.Text()
		if line == "PING" || strings.HasPrefix(line, "PING ") {
			c.SetReadDeadline(time.Now().Add(silent))
		} else if strings.TrimSpace(line) != "" {
			select {
			case c.lines <- line:
			case <-c.done:
			}
		}
	}
	c.err = lost("%s closed the connection", c.address)
	if err := scanner.Err(); errors.Is(err, bufio.ErrTooLong) {
		c.err = &Error{"protocol", fmt.Sprintf("a line has more than %d bytes", maxLine)}
	} else if err != nil {
		c.err = lost("%s: %v", c.address, err)
	}
}

func (c *connection) keepAlive() {
	for {
		select {
		case <-c.done:
			return
		case now := <-time.After(pingEvery):
			c.send(fmt.Sprintf("PING %d", now.UnixMilli()))
		}
	}
}

func (c *connection) send(line string) {
	c.SetWriteDeadline(time.Now().Add(silent))
	if _, err := c.Write([]byte(line + "\n")); err != nil {
		c.Conn.Close() // the reader reports the end
	}
}

// line returns the next line that is not a PING.
func (c *connection) line(ctx context.Context) (string, error) {
	select {
	case line, ok := <-c.lines:
		if !ok {
			return "", c.err
		} else if line == "ERROR" || strings.HasPrefix(line, "ERROR ") {
			return "", refusal(strings.TrimPrefix(line[5:], " "))
		}
		return line, nil
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

func (c *connection) close() {
	c.once.Do(func() { close(c.done); c.Conn.Close() })
}

// connectTo connects to one address and waits for SERVER.
func connectTo(ctx context.Context, address string, options Options, limit time.Duration) (*connection, error) {
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var dialer interface {
		DialContext(ctx context.Context, network, address string) (net.Conn, error)
	} = &net.Dialer{}
	if options.TLS != nil {
		dialer = &tls.Dialer{Config: options.TLS}
	}
	conn, err := dialer.DialContext(limited, "tcp", address)
	if err != nil {
		return nil, lost("%v", err)
	}
	c := &connection{Conn: conn, address: address, lines: make(chan string, 1000), done: make(chan struct{})}
	go c.read()
	go c.keepAlive()
	first, err := c.line(limited)
	if err != nil && ctx.Err() == nil && limited.Err() != nil {
		err = lost("%s did not answer in time", address)
	} else if err == nil && !strings.HasPrefix(first, "SERVER ") {
		err = &Error{"protocol", address + " is no replicad"}
	}
	if err != nil {
		c.close()
		return nil, err
	}
	c.send("NAME " + or(options.Name, "replicad.go"))
	if options.Secret != "" {
		c.send("AUTH " + options.Secret)
	}
	return c, nil
}

// connect returns a connection to the first address that answers, in their order.
func connect(ctx context.Context, addresses string, options Options) (c *connection, err error) {
	all, limit := strings.Split(addresses, ","), connectLimit
	if len(all) > 1 {
		limit = connectOne
	}
	for _, address := range all {
		if c, err = connectTo(ctx, strings.TrimSpace(address), options, limit); code(err) != "" {
			return c, err
		}
	}
	return nil, err
}

// vector says how far each writer has got: min for all, ahead by number. word is NOW or EARLIEST in its place.
type vector struct {
	word, epoch string
	min         int64
	ahead       map[int]int64
}

func parseVector(text string) (vector, error) {
	if text == "NOW" || text == "EARLIEST" {
		return vector{word: text}, nil
	}
	found := vectors.FindStringSubmatch(text)
	if found == nil {
		return vector{}, &Error{"bad_token", text + " is no token"}
	}
	min, err := strconv.ParseInt(found[2], 10, 64)
	v := vector{epoch: found[1], min: min, ahead: map[int]int64{}}
	for _, pair := range strings.Split(found[3], "~")[1:] {
		number, position, _ := strings.Cut(pair, ".")
		n, _ := strconv.Atoi(number)
		if v.ahead[n], err = strconv.ParseInt(position, 10, 64); err != nil {
			break
		}
	}
	return v, err
}

func (v vector) at(number int) int64 {
	if position, ok := v.ahead[number]; ok && position > v.min {
		return position
	}
	return v.min
}

func (v vector) String() string {
	if v.word != "" {
		return v.word
	}
	text, numbers := strconv.FormatInt(v.min, 10), []int{}
	if v.epoch != "" {
		text = v.epoch + "!" + text
	}
	for number, position := range v.ahead {
		if position > v.min {
			numbers = append(numbers, number)
		}
	}
	sort.Ints(numbers)
	for _, number := range numbers {
		text += fmt.Sprintf("~%d.%d", number, v.ahead[number])
	}
	return text
}

// progress is the position in one stream over many connections.
type progress struct {
	stream            string
	base              vector
	epoch             string
	numbers           map[string]int   // of the listed writers
	marks             map[string]int64 // positions of listed writers that were received
	batches           map[string][]json.RawMessage
	held              int  // bytes of open batches
	strange           bool // rows of an unlisted writer were handed over: they do not move the token
	wentBack          bool // a position went back in this generation
	accepted          bool // a token of ours, at least once
	refusals          int  // in a row
	answered, setOpen bool // setOpen: the next WRITERS may add to the set
}

func newProgress(stream, token string) (*progress, error) {
	base, err := parseVector(or(token, "NOW"))
	return &progress{stream: stream, base: base, epoch: base.epoch, numbers: map[string]int{}, marks: map[string]int64{}}, err
}

// vector returns where all positions are now. A writer whose POSITION was not received has the position of the base.
func (p *progress) vector() vector {
	whole := len(p.numbers) > 0 && len(p.marks) == len(p.numbers)
	if !whole && p.base.word != "" {
		return p.base
	}
	v := vector{epoch: p.epoch, min: math.MaxInt64, ahead: map[int]int64{}}
	if !whole {
		v.min = p.base.min
		for number, position := range p.base.ahead {
			v.ahead[number] = position
		}
	}
	for name, number := range p.numbers {
		v.ahead[number] = p.base.at(number)
		if position, known := p.marks[name]; known {
			v.ahead[number] = position
		}
		v.min = least(v.min, v.ahead[number])
	}
	return v
}

func least(a, b int64) int64 {
	if a < b {
		return a
	}
	return b
}

func (p *progress) newConnection() {
	p.base = p.vector()
	if p.base.word != "" {
		p.marks = map[string]int64{}
	}
	p.answered, p.setOpen, p.held, p.batches = false, false, 0, map[string][]json.RawMessage{}
}

func (p *progress) reset(instance string, above *int64, reason string) []Event {
	token := p.vector().String()
	return []Event{{Stream: p.stream, Instance: instance, Above: above, Token: token, Reason: reason, Reset: true}}
}

// begin makes a token the position of all writers.
func (p *progress) begin(base vector) {
	p.base, p.epoch, p.strange, p.wentBack = base, base.epoch, false, false
	p.numbers, p.marks = map[string]int{}, map[string]int64{}
}

// rewind goes back to a token of another generation. The rows of all writers are void above the minimum of both tokens,
// unless nothing is above the token: so some rows come again, and none is missing.
func (p *progress) rewind(to vector) []Event {
	at := p.vector()
	void := p.strange || at.min > to.min
	for number := range at.ahead {
		void = void || at.at(number) > to.at(number)
	}
	if at.word != "" || !void {
		p.begin(to)
		return nil
	}
	above := least(at.min, to.min)
	p.begin(vector{epoch: to.epoch, min: above})
	return p.reset("", &above, "forked")
}

// writers takes a line of WRITERS: what to discard, and whether to connect again.
func (p *progress) writers(words []string) (resets []Event, again bool) {
	fork := p.epoch != "" && p.epoch != words[2]
	// Writers that are not listed have the minimum as their position. Their rows above it are void, and do not come again
	// on this connection; nor do those of other writers, which are discarded with them.
	if at := p.vector(); fork && p.wentBack && (p.strange || len(p.numbers) > 1) {
		p.begin(vector{epoch: words[2], min: at.min})
		return p.reset("", &at.min, "forked"), true
	}
	p.base, p.epoch, p.wentBack = p.vector(), words[2], p.wentBack && !fork
	if p.base.word == "" {
		p.base.epoch = p.epoch
	} else if len(words) == 3 && p.base.word == "NOW" {
		p.base.word = "EARLIEST" // no writer yet: NOW is the same
	}
	named, adds := map[string]int{}, p.setOpen && !fork && len(words) > 3
	for _, pair := range words[3:] {
		equals := strings.LastIndex(pair, "=")
		if number, err := strconv.Atoi(pair[equals+1:]); equals > 0 && err == nil {
			named[pair[:equals]] = number
			_, known := p.numbers[pair[:equals]]
			adds = adds && !known
		}
	}
	for name, number := range p.numbers {
		if _, stays := named[name]; adds {
			named[name] = number
		} else if !stays {
			delete(p.marks, name)
		}
	}
	p.numbers, p.setOpen = named, true
	return nil, false
}

// position takes a line of POSITION: what to discard, and whether rows are missing.
func (p *progress) position(instance string, prev, next int64) (resets []Event, gap bool) {
	mark, known := p.marks[instance]
	gap = known && p.answered && prev > mark
	p.answered, p.accepted, p.setOpen = true, true, false
	delete(p.batches, instance)
	if _, listed := p.numbers[instance]; listed && !gap && (next < prev || !known || next > mark) {
		p.marks[instance] = next
	}
	if next < prev {
		p.wentBack = true
		return p.reset(instance, &next, "moved_back"), false
	}
	return nil, gap
}

// row takes a row: an event if it ends a batch.
func (p *progress) row(instance, token, row string) ([]Event, error) {
	if !p.answered {
		return nil, nil
	}
	rows := append(p.batches[instance], json.RawMessage(row))
	if token == "batch" {
		if p.held += len(row); p.held > maxBatch || len(rows) > maxBatchRows {
			return nil, &Error{"protocol", "a batch of " + instance + " does not end"}
		}
		p.batches[instance] = rows
		return nil, nil
	}
	p.held, p.batches = 0, map[string][]json.RawMessage{} // no other row comes within a batch
	at, err := strconv.ParseInt(token, 10, 64)
	if mark, known := p.marks[instance]; err != nil || (known && at <= mark) {
		return nil, err // a row that came before is left out
	}
	if _, listed := p.numbers[instance]; listed {
		p.marks[instance] = at
	} else {
		p.strange = true
	}
	return []Event{{Stream: p.stream, Instance: instance, At: at, Token: p.vector().String(), Rows: rows}}, nil
}

// take takes one line. again: the client has to send REPLICATE on this connection.
func (p *progress) take(line string) (events []Event, again bool, err error) {
	words := strings.SplitN(line, " ", 5)
	if len(words) < 3 || words[1] != p.stream {
		return nil, false, nil
	}
	switch {
	case words[0] == "RDATA" && len(words) == 5:
		events, err = p.row(words[2], words[3], words[4])
	case words[0] == "POSITION" && len(words) == 5:
		prev, wrong := strconv.ParseInt(words[3], 10, 64)
		next, also := strconv.ParseInt(words[4], 10, 64)
		if wrong != nil || also != nil {
			return nil, false, &Error{"protocol", line}
		}
		if events, again = p.position(words[2], prev, next); again {
			err = lost("rows of %s are missing before %s", p.stream, words[3])
		}
	case words[0] == "WRITERS":
		if events, again = p.writers(strings.Split(line, " ")); again {
			err = lost("history of %s forked", p.stream)
		}
	}
	return events, false, err
}

// refused decides what an ERROR means for the subscription. again: send REPLICATE on this connection.
func (p *progress) refused(err error) (events []Event, again bool, _ error) {
	kind, named := code(err), resume.FindStringSubmatch(err.Error())
	if kind == "stream_waits" { // a notice
		return nil, false, nil
	}
	p.refusals++
	ours := p.accepted || (p.base.word == "" && p.base.epoch != "")
	switch {
	case kind == "bad_token" && named != nil && p.refusals < refusalLimit:
		to, err := parseVector(named[1])
		return p.rewind(to), true, err
	case kind == "token_expired", kind == "bad_token" && ours, kind == "token_ahead" && p.refusals >= refusalLimit:
		p.begin(vector{word: "EARLIEST"})
		return p.reset("", nil, kind), true, nil
	case kind == "stream_refused" && !p.accepted:
		return nil, false, fmt.Errorf("the stream cannot be served: %w", errors.New(err.Error()))
	}
	return nil, false, err
}

// retry runs attempts until the context is done or an error comes that no other try helps against.
func retry(ctx context.Context, options Options, attempt func(good func()) error) error {
	pause := firstPause
	for {
		err := attempt(func() { pause = firstPause })
		if ctx.Err() != nil || !passing.MatchString(code(err)) {
			return err
		}
		if options.OnDisconnect != nil {
			options.OnDisconnect(err, pause)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
		if pause *= 2; pause > maxPause {
			pause = maxPause
		}
	}
}

// Follow calls handle for the rows and resets of a stream, over any number of connections, until the context is done,
// handle fails, or the server answers with an error that no other try helps against.
func Follow(ctx context.Context, addresses, stream string, options Options, handle func(Event) error) error {
	p, err := newProgress(stream, options.Token)
	if err != nil {
		return err
	}
	return retry(ctx, options, func(good func()) error {
		c, err := connect(ctx, addresses, options)
		if err != nil {
			return err
		}
		defer c.close()
		for again := true; ; {
			if again {
				p.newConnection()
				c.send("REPLICATE " + stream + " " + p.vector().String())
			}
			line, err := c.line(ctx)
			var events []Event
			if again = false; err != nil && code(err) != "" {
				events, again, err = p.refused(err)
			} else if err == nil {
				events, again, err = p.take(line)
			}
			for _, event := range events {
				if err := handle(event); err != nil {
					return err
				}
			}
			if err != nil {
				return err
			} else if p.answered {
				p.refusals = 0
				good()
			}
		}
	})
}

// lease sends requests on one connection, one at a time.
type lease struct {
	*connection
	mutex sync.Mutex
}

// ask sends a request and returns the lines of its answer, up to the command that ends it.
func (l *lease) ask(ctx context.Context, ends, form string, values ...any) (lines []string, err error) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.send(fmt.Sprintf(form, values...))
	for {
		line, err := l.line(ctx)
		if err != nil {
			return nil, err
		}
		word, _, _ := strings.Cut(line, " ")
		if word == "RDATA" || word == ends {
			lines = append(lines, line)
		}
		if word == ends {
			return lines, nil
		}
	}
}

// Work calls handle for the pods of a tube under a lease and acknowledges each when handle has returned, until the
// context is done. A pod may come again, so handle must be idempotent; its context ends with the lease. A pod for which
// handle fails Tries times is parked.
func Work(ctx context.Context, addresses, tube string, options Options, handle func(context.Context, Pod) error) error {
	options.TTL, options.Limit, options.Tries = or(options.TTL, 30), or(options.Limit, 100), or(options.Tries, 5)
	return retry(ctx, options, func(good func()) error {
		c, err := connect(ctx, addresses, options)
		if err != nil {
			return err
		}
		defer c.close()
		l := &lease{connection: c}
		for {
			part := tube + " " + or(options.Partition, "0/1")
			answer, err := l.ask(ctx, "LEASE", "CLAIM %s ttl=%d wait=20", part, options.TTL)
			if err == nil {
				good()
				err = l.work(ctx, part+" "+strings.Split(answer[0], " ")[3], options, handle)
			}
			if kind := code(err); kind != "lease_held" && kind != "lease_lost" {
				return err
			}
		}
	})
}

// work works until the lease is lost.
func (l *lease) work(ctx context.Context, held string, options Options, handle func(context.Context, Pod) error) error {
	leased, end := context.WithCancel(ctx)
	defer end()
	go func() { // PODS renews the lease as well, so that it does not matter that RENEW waits for its answer
		for leased.Err() == nil {
			select {
			case <-leased.Done():
			case <-time.After(time.Duration(options.TTL) * time.Second / 3):
				if _, err := l.ask(ctx, "LEASE", "RENEW %s", held); err != nil {
					end()
				}
			}
		}
	}()
	for cursor := "0.0"; ; {
		lines, err := l.ask(ctx, "CURSOR", "PODS %s after=%s limit=%d wait=15", held, cursor, options.Limit)
		if err != nil {
			return err
		}
		for _, line := range lines[:len(lines)-1] {
			var pod Pod
			decoder := json.NewDecoder(strings.NewReader(strings.SplitN(line, " ", 5)[4]))
			decoder.UseNumber()
			if err = decoder.Decode(&pod); err != nil {
				return err
			}
			if err = process(leased, pod, options, handle); err == nil {
				_, err = l.ask(ctx, "ACKED", "ACK %s %d", held, pod.Seq)
			} else if leased.Err() != nil {
				return &Error{"lease_lost", "the lease could not be renewed"}
			} else {
				text := fmt.Sprintf("%.1000s", breaks.ReplaceAllString(or(err.Error(), "failed"), " "))
				_, err = l.ask(ctx, "PARKED", "PARK %s %d * %d %s", held, pod.Seq, options.Tries, text)
			}
			if err != nil {
				return err
			}
		}
		cursor = strings.Split(lines[len(lines)-1], " ")[3]
	}
}

func process(ctx context.Context, pod Pod, options Options, handle func(context.Context, Pod) error) (err error) {
	for tried, pause := 1, firstPause; ctx.Err() == nil; tried, pause = tried+1, 2*pause {
		if err = handle(ctx, pod); err == nil || tried >= options.Tries {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
	return ctx.Err()
}
