// A tool's round trip from the .proto alone: the model calls a function, and answers with its result. ./build.sh, then
//
//	./with_tools ADDRESS QUESTION
//
// main.go above shows how a broken stream resumes. The resume of a stream with tools has ParseOutput and the same Chat,
// without messages.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "octavo-client-example/inference"
)

const city = `{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}`

var weather = &pb.Tool{Name: "get_weather", Description: "Tells the weather in a city.", ParametersJson: city}

func getWeather(arguments string) string {
	var read struct{ City string }
	if err := json.Unmarshal([]byte(arguments), &read); err != nil {
		return "error: " + err.Error() // models recover from an error that they are told
	}
	return fmt.Sprintf("It is sunny in %s.", read.City)
}

// said streams what the model says, and returns it as a message.
func said(client pb.InferenceClient, messages []*pb.ChatMessage, choice pb.ToolChoice) (*pb.ChatMessage, error) {
	maxTokens := uint32(500)
	chat := &pb.ChatPrompt{Messages: messages, Tools: []*pb.Tool{weather}, ToolChoice: choice}
	stream, err := client.Generate(context.Background(), &pb.GenerateRequest{
		Input:       &pb.GenerateRequest_Chat{Chat: chat},
		ParseOutput: true,
		Sampling:    &pb.SamplingParams{MaxTokens: &maxTokens},
	})
	if err != nil {
		return nil, err
	}
	message := &pb.ChatMessage{Role: "assistant"}
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return message, nil
		}
		if err != nil {
			return nil, err
		}
		for _, delta := range response.GetChunk().GetDeltas() {
			message.Content += delta.GetContent()
			piece := delta.GetToolCall()
			if piece == nil {
				continue
			}
			// The first piece of a call has its id and name.
			if int(piece.Index) == len(message.ToolCalls) {
				message.ToolCalls = append(message.ToolCalls, &pb.ToolCall{Id: piece.Id, Name: piece.Name})
			}
			message.ToolCalls[piece.Index].Arguments += piece.Arguments
		}
	}
}

func run(address, question string) error {
	connection, err := grpc.Dial(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	client := pb.NewInferenceClient(connection)
	messages := []*pb.ChatMessage{{Role: "user", Content: question}}
	asked, err := said(client, messages, pb.ToolChoice_TOOL_CHOICE_REQUIRED)
	if err != nil {
		return err
	}
	messages = append(messages, asked)
	for _, call := range asked.ToolCalls {
		fmt.Println(call.Name, call.Arguments)
		result := getWeather(call.Arguments)
		messages = append(messages, &pb.ChatMessage{Role: "tool", ToolCallId: call.Id, Content: result})
	}
	answer, err := said(client, messages, pb.ToolChoice_TOOL_CHOICE_NONE)
	if err != nil {
		return err
	}
	fmt.Println(answer.Content)
	return nil
}

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: with_tools ADDRESS QUESTION")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
