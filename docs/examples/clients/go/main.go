// Make one decision, and go on with it after whatever happened: decide WORK_FILE OPERATION FACTS_JSON.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"time"

	"example.com/decide/decide"
	pb "example.com/decide/decideoncev1"
)

const (
	within = time.Minute
	// sysexits.h: a temporary failure, try again.
	exTempFail = 75
)

func main() {
	log.SetFlags(0)
	var facts map[string]any
	if err := json.Unmarshal([]byte(os.Args[3]), &facts); err != nil {
		log.Fatal(err)
	}
	request, err := decide.Begin(os.Args[1], os.Args[2], facts)
	if err != nil {
		log.Fatal(err)
	}
	os.Exit(finish(request))
}

// finish prints the outcome, and gives an exit code: exTempFail where the same command is to be run again.
func finish(request []byte) int {
	conn, err := decide.Connect()
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	answer, err := decide.Finish(ctx, conn, os.Getenv("DECIDEONCE_TOKEN"), request)
	if err != nil {
		log.Print(err)
		if _, helps := decide.RetryAfter(err); helps {
			return exTempFail
		}
		return 1
	}
	switch answer.GetStatus() {
	case pb.DecisionStatus_DECISION_STATUS_SUCCEEDED:
		fmt.Println(answer.GetDecision().GetOutcome(), answer.GetProvenance().GetDecisionId())
		return 0
	case pb.DecisionStatus_DECISION_STATUS_PROCESSING, pb.DecisionStatus_DECISION_STATUS_FAILED_RETRYABLE:
		log.Print(answer.GetStatus(), " ", answer.GetFailure().GetReason())
		return exTempFail
	default:
		log.Print(answer.GetStatus(), " ", answer.GetFailure().GetReason())
		return 1
	}
}
