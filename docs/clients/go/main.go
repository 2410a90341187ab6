// Streams a completion from the .proto alone: ./build.sh, then
//
//	./client ADDRESS[,ADDRESS...] PROMPT [MAX_TOKENS [SEED]]
//
// If the connection breaks or a router stops, it resumes at the next address with what it has: no token is lost or
// repeated.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	pb "octavo-client-example/inference"
)

const mostFailures = 10 // in a row, without a message in between

// gRPC itself retries what a full router refuses, after the delay in grpc-retry-pushback-ms, a limited number of times.
const serviceConfig = `{
  "methodConfig": [{
    "name": [{"service": "octavo.v1.Inference"}],
    "retryPolicy": {
      "maxAttempts": 5, "initialBackoff": "1s", "maxBackoff": "30s", "backoffMultiplier": 2,
      "retryableStatusCodes": ["RESOURCE_EXHAUSTED"]
    }
  }],
  "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1}
}`

// held is what a client holds of a stream of one choice: all that a resume elsewhere needs.
type held struct {
	started   *pb.Started
	attempt   uint32
	tokenIDs  []uint32
	textBytes uint64
	finished  bool
}

// add takes a message and returns its new text.
func (h *held) add(response *pb.GenerateResponse) (string, error) {
	if started := response.GetStarted(); started != nil {
		h.started = started
		if started.Attempt > h.attempt {
			h.attempt = started.Attempt
		}
	}
	chunk := response.GetChunk()
	if chunk == nil || int(chunk.FirstToken) < len(h.tokenIDs) {
		return "", nil // no chunk, or one that was received already
	}
	if int(chunk.FirstToken) > len(h.tokenIDs) {
		return "", fmt.Errorf("tokens %d to %d are missing", len(h.tokenIDs), chunk.FirstToken-1)
	}
	h.tokenIDs = append(h.tokenIDs, chunk.TokenIds...)
	h.textBytes += uint64(len(chunk.Text))
	h.finished = chunk.Finish != nil
	return chunk.Text, nil
}

// request returns `first` until a stream has started, then its resume.
func (h *held) request(first *pb.GenerateRequest) *pb.GenerateRequest {
	if h.started == nil {
		return first
	}
	h.attempt++
	return &pb.GenerateRequest{
		RequestId: h.started.RequestId,
		Model:     h.started.Model,
		Sampling:  h.started.Sampling,
		Resume: &pb.Resume{
			Attempt:        h.attempt,
			PromptTokenIds: h.started.PromptTokenIds,
			Fingerprint:    h.started.Fingerprint,
			Choices: []*pb.ResumeChoice{{
				Index:              0,
				OutputTokenIds:     h.tokenIDs,
				TextBytesDelivered: h.textBytes,
				Finished:           h.finished,
			}},
		},
	}
}

// read prints a stream's text until it ends. progressed is true if a message came.
func (h *held) read(client pb.InferenceClient, first *pb.GenerateRequest) (progressed bool, err error) {
	stream, err := client.Generate(context.Background(), h.request(first))
	if err != nil {
		return false, err
	}
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return progressed, nil
		}
		if err != nil {
			return progressed, err
		}
		progressed = true
		text, err := h.add(response)
		if err != nil {
			return progressed, err
		}
		fmt.Print(text)
	}
}

// A server that shuts down may drop a call that has just come, with CANCELLED as status and as the whole message.
func serverWent(err error) bool {
	dropped := status.Code(err) == codes.Canceled && status.Convert(err).Message() == "CANCELLED"
	return dropped || status.Code(err) == codes.Unavailable
}

func run(addresses string, first *pb.GenerateRequest) error {
	var clients []pb.InferenceClient
	for _, address := range strings.Split(addresses, ",") {
		credentials := grpc.WithTransportCredentials(insecure.NewCredentials())
		connection, err := grpc.Dial(address, credentials, grpc.WithDefaultServiceConfig(serviceConfig))
		if err != nil {
			return err
		}
		defer connection.Close()
		clients = append(clients, pb.NewInferenceClient(connection))
	}
	var h held
	for failures, turn := 0, 0; !h.finished; {
		progressed, err := h.read(clients[turn%len(clients)], first)
		if err == nil {
			continue
		}
		if progressed {
			failures = 0
		}
		failures++
		if !serverWent(err) || failures == mostFailures {
			return err
		}
		fmt.Fprintf(os.Stderr, "\n[%s; going on at token %d]\n", status.Convert(err).Message(), len(h.tokenIDs))
		turn++
		pause := 100 * time.Millisecond << failures
		if pause > 2*time.Second {
			pause = 2 * time.Second
		}
		time.Sleep(pause)
	}
	return nil
}

// argument returns the i-th argument as a number, or a default.
func argument(i int, otherwise uint64) (uint64, error) {
	if len(os.Args) <= i {
		return otherwise, nil
	}
	return strconv.ParseUint(os.Args[i], 10, 64)
}

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: client ADDRESS[,ADDRESS...] PROMPT [MAX_TOKENS [SEED]]")
		os.Exit(2)
	}
	maxTokens, err := argument(3, 64)
	if err == nil {
		var seed uint64
		seed, err = argument(4, 0)
		tokens := uint32(maxTokens)
		first := &pb.GenerateRequest{
			Input:    &pb.GenerateRequest_Prompt{Prompt: os.Args[2]},
			Sampling: &pb.SamplingParams{MaxTokens: &tokens, Seed: &seed},
		}
		if err == nil {
			err = run(os.Args[1], first)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
