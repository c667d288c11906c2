// A receiver of webhooks of `replicad sender --sign standard`, in Go 1.19 and newer, with the standard library only. With
// a library: github.com/standard-webhooks/standard-webhooks/libraries/go.
//
//	WEBHOOK_SECRET=whsec_... go run receiver.go 8080
package main

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"math"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	most       = 8 << 20         // bytes of a request; the sender's --transaction-bytes is 4 MiB
	remembered = 10_000          // ids of requests that were accepted
	maxAge     = 5 * time.Minute // of a signature
)

// signed says whether a request was signed with the key, at most five minutes ago.
func signed(key []byte, header http.Header, body []byte) bool {
	id, sent := header.Get("webhook-id"), header.Get("webhook-timestamp")
	seconds, err := strconv.ParseInt(sent, 10, 64)
	if err != nil || id == "" || math.Abs(time.Since(time.Unix(seconds, 0)).Seconds()) > maxAge.Seconds() {
		return false
	}
	made := hmac.New(sha256.New, key)
	fmt.Fprintf(made, "%s.%s.", id, sent)
	made.Write(body)
	for _, one := range strings.Split(header.Get("webhook-signature"), " ") {
		found, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(one, "v1,"))
		if err == nil && strings.HasPrefix(one, "v1,") && hmac.Equal(found, made.Sum(nil)) {
			return true
		}
	}
	return false
}

type event struct {
	Data json.RawMessage `json:"data"`
}

// events returns the facts and updates of `--form webhook`, or the data of CloudEvents.
func events(body []byte) (found []json.RawMessage, err error) {
	var batch []event
	if strings.HasPrefix(string(body), "[") {
		err = json.Unmarshal(body, &batch)
	} else {
		var one struct {
			event
			SpecVersion    string `json:"specversion"`
			Facts, Updates []json.RawMessage
		}
		if err = json.Unmarshal(body, &one); one.SpecVersion == "" {
			return append(one.Facts, one.Updates...), err
		}
		batch = []event{one.event}
	}
	for _, each := range batch {
		found = append(found, each.Data)
	}
	return found, err
}

func main() {
	key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(os.Getenv("WEBHOOK_SECRET"), "whsec_"))
	if err != nil || len(key) < 24 || len(os.Args) != 2 {
		log.Fatal("WEBHOOK_SECRET is what `replicad sender secret --sign standard NAME` prints; the argument is a port")
	}
	var turn sync.Mutex
	seen, order := map[string]bool{}, []string{} // a real receiver keeps the ids where it keeps the effect of the events
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, most))
		if err != nil {
			w.WriteHeader(http.StatusRequestEntityTooLarge)
			return
		} else if r.Method != http.MethodPost || !signed(key, r.Header, body) {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		turn.Lock()
		defer turn.Unlock()
		if id := r.Header.Get("webhook-id"); !seen[id] { // a repeated request has the same id
			found, err := events(body)
			if err != nil {
				w.WriteHeader(http.StatusBadRequest)
				return
			}
			for _, each := range found {
				fmt.Println(string(each))
			}
			seen[id], order = true, append(order, id)
			if len(order) > remembered {
				delete(seen, order[0])
				order = order[1:]
			}
		}
		w.WriteHeader(http.StatusNoContent)
	})
	log.Fatal(http.ListenAndServe("127.0.0.1:"+os.Args[1], nil))
}
